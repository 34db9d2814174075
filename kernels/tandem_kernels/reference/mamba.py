"""State-space layers of Mamba 2 in plain torch, one token of each request after the other.

All of it is computed in float32 and rounded once. Source: Dao and Gu, Transformers are SSMs, 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.reference.layouts import STATES, kernel_takes
from tandem_kernels.reference.state_runs import Lockstep, state_runs
from tandem_kernels.reference.steady import sigmoid, silu, softplus


@kernel_takes(
    mixed="_ | _",
    steps="T | H",
    a_log="H: float32",
    dt_bias="H: float32",
    skip="H: float32",
    states="_ | H _ _: float32",
    metadata=STATES,
    kept="_ _ _",
)
def mamba_scan(
    mixed: Tensor,
    steps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    fixed_order: bool = False,
    kept: Tensor | None = None,
) -> Tensor:
    """Take each token into its request's state, and read the state.

        S <- exp(-exp(a_log) dt) S + B (dt x)^T;  y = S^T C + skip x

    where dt = softplus(steps + dt_bias). Head i has B and C of group i // (heads per group).

    Args:
        mixed: [T + num_pending_rows, H P + 2 G N], the heads' x, then B and C of the groups, as
            `causal_conv` returns them.
        steps: [T, H].
        a_log, dt_bias, skip: [H] float32.
        states: [blocks, H, N, P] float32; those of `metadata.blocks` are replaced.
        metadata: Whose tokens these are.
        fixed_order: The result must not depend on how a request's tokens are cut into steps.
        kept: `KeptInputs.gates`, steps that decodes read and write; None: nothing is pending.

    Returns:
        [T, H, P] of the dtype of `mixed`. Rows of padding are zero.
    """
    _, num_heads, size, head_dim = states.shape
    inner = num_heads * head_dim
    groups = (mixed.shape[1] - inner) // (2 * size)
    out = mixed.new_zeros((len(steps), num_heads, head_dim))
    runs = state_runs(metadata)
    if runs is None:
        return out
    walk = Lockstep(runs, states, metadata)
    wide = mixed[walk.lines].float()
    x = wide[:, :inner].reshape(len(wide), num_heads, head_dim)
    b, c = (
        part.reshape(len(wide), groups, size).repeat_interleave(num_heads // groups, dim=1)
        for part in wide[:, inner:].chunk(2, dim=1)
    )
    dt = softplus(walk.gates(steps, kept).float() + dt_bias)
    decay = torch.exp(-a_log.exp() * dt)[..., None, None]
    tokens = decay, b[..., None], (dt[..., None] * x)[:, :, None], c[..., None], skip[:, None] * x
    read = []
    for decays, takes, given, reads, past in zip(*map(walk.steps, tokens), strict=True):
        state = decays * walk.states() + takes * given
        read.append((state * reads).sum(-2) + past)
        walk.go(state)
    walk.end(read, out)
    return out


@kernel_takes(x="T D", gate="T | D")
def gated_square_sums(x: Tensor, gate: Tensor, groups: int, is_behind: bool = False) -> Tensor:
    """Add up the squares of `x` times the SiLU of its gate.

    Args:
        x, gate: [T, D].
        groups: Of as many neighbours in D.
        is_behind: The gate belongs behind the norm: the squares are those of `x` alone.

    Returns:
        [T, groups] float32.
    """
    return _in_groups(x, None if is_behind else gate, groups).square().sum(-1)


@kernel_takes(x="T D", gate="T | D", weight="D", means="T _: float32")
def gated_group_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    groups: int,
    means: Tensor | None = None,
    is_behind: bool = False,
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
        is_behind: `x` is scaled first, and then multiplied by the sigmoid of its gate.

    Returns:
        [T, D].
    """
    parts = _in_groups(x, None if is_behind else gate, groups)
    found = parts.square().mean(-1) if means is None else means
    normed = (parts * torch.rsqrt(found + eps)[:, :, None]).flatten(1) * weight.float()
    return (normed * sigmoid(gate.float()) if is_behind else normed).to(x.dtype)


def _in_groups(x: Tensor, gate: Tensor | None, groups: int) -> Tensor:
    wide = x.float() if gate is None else x.float() * silu(gate.float())
    return wide.reshape(len(x), groups, x.shape[1] // groups)
