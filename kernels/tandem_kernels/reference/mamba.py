"""State-space layers of Mamba 2 in plain torch, one token after the other.

All of it is computed in float32 and rounded once. Source: Dao and Gu, Transformers are SSMs, 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.reference.delta_rule import requests_of
from tandem_kernels.reference.steady import silu, softplus


def mamba_scan(
    mixed: Tensor,
    steps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    fixed_order: bool = False,
) -> Tensor:
    """Take each token into its request's state, and read the state.

        S <- exp(-exp(a_log) dt) S + B (dt x)^T;  y = S^T C + skip x

    where dt = softplus(steps + dt_bias). Head i has B and C of group i // (heads per group).

    Args:
        mixed: [T, H P + 2 G N], the heads' x, then B and C of the groups.
        steps: [T, H].
        a_log, dt_bias, skip: [H] float32.
        states: [blocks, H, N, P] float32; those of `metadata.blocks` are replaced.
        metadata: Whose tokens these are.
        fixed_order: The result must not depend on how a request's tokens are cut into steps.

    Returns:
        [T, H, P] of the dtype of `mixed`. Rows of padding are zero.
    """
    _, num_heads, size, head_dim = states.shape
    inner = num_heads * head_dim
    groups = (mixed.shape[1] - inner) // (2 * size)
    wide = mixed.float()
    x = wide[:, :inner].reshape(len(mixed), num_heads, head_dim)
    b, c = (
        part.reshape(len(mixed), groups, size).repeat_interleave(num_heads // groups, dim=1)
        for part in wide[:, inner:].chunk(2, dim=1)
    )
    dt = softplus(steps.float() + dt_bias)
    decay = torch.exp(-a_log.exp() * dt)
    out = torch.zeros(x.shape)
    for start, stop, block, goes_on in requests_of(metadata):
        state = states[block] if goes_on else torch.zeros_like(states[block])
        for t in range(start, stop):
            taken = b[t][:, :, None] * (dt[t][:, None] * x[t])[:, None]
            state = decay[t][:, None, None] * state + taken
            out[t] = (state * c[t][:, :, None]).sum(-2) + skip[:, None] * x[t]
        states[block] = state
    return out.to(mixed.dtype)


def gated_square_sums(x: Tensor, gate: Tensor, groups: int) -> Tensor:
    """Add up the squares of `x` times the SiLU of its gate.

    Args:
        x, gate: [T, D].
        groups: Of as many neighbours in D.

    Returns:
        [T, groups] float32.
    """
    return _gated(x, gate, groups).square().sum(-1)


def gated_group_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, means: Tensor | None = None
) -> Tensor:
    """Multiply `x` by the SiLU of its gate, then scale each group to unit mean square, and each
    number by its `weight`.

    Args:
        x, gate: [T, D].
        weight: [D].
        eps: Added to the mean square.
        groups: Of as many neighbours in D.
        means: [T, groups] float32, mean squares of groups that are wider than ours; None: ours are
            whole.

    Returns:
        [T, D].
    """
    gated = _gated(x, gate, groups)
    found = gated.square().mean(-1) if means is None else means
    normed = gated * torch.rsqrt(found + eps)[:, :, None]
    return (normed.flatten(1) * weight.float()).to(x.dtype)


def _gated(x: Tensor, gate: Tensor, groups: int) -> Tensor:
    return (x.float() * silu(gate.float())).reshape(len(x), groups, x.shape[1] // groups)
