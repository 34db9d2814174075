"""Linear attention by the gated delta rule in plain torch, one token after the other.

All of it is computed in float32 and rounded once. Source: Yang et al., Gated Delta Networks, 2024.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.reference.steady import sigmoid, silu, softplus

L2_EPS = 1e-6
"""Added to the sum of squares when queries and keys are normalised."""


def causal_conv(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    bias: Tensor | None = None,
    activates: bool = True,
) -> Tensor:
    """Convolve each channel over its last K inputs.

    Args:
        x: [T, C].
        weight: [C, K]; the last column belongs to the token itself.
        states: [N, C, K - 1], the last inputs of each block's request, oldest first; those of
            `metadata.blocks` are replaced.
        metadata: Whose tokens these are.
        bias: [C], added to the sum; None: nothing is.
        activates: SiLU of the sum is returned.

    Returns:
        [T, C]. Rows of padding are zero.
    """
    out = torch.zeros_like(x)
    width = weight.shape[1]
    for start, stop, block, goes_on in requests_of(metadata):
        before = states[block] if goes_on else torch.zeros_like(states[block])
        inputs = torch.cat((before, x[start:stop].t().to(states.dtype)), dim=1)
        wide = F.conv1d(inputs.float()[None], weight.float()[:, None], groups=weight.shape[0])
        sums = wide[0].t() if bias is None else wide[0].t() + bias.float()
        out[start:stop] = (silu(sums) if activates else sums).to(x.dtype)
        states[block] = inputs[:, inputs.shape[1] - (width - 1) :]
    return out


def gated_delta_rule(
    mixed: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    fixed_order: bool = False,
) -> Tensor:
    """Take each token into its request's state, and read the state with its query.

        S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

    where g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b). Queries and keys have unit
    length, and queries are divided by the root of K. Value head i has the query and key of head
    i // (value heads per key head).

    Args:
        mixed: [T, 2 Hk K + Hv V], queries, keys and values.
        gates: [T, 2 Hv], b and a.
        a_log, dt_bias: [Hv] float32.
        states: [N, Hv, K, V] float32; those of `metadata.blocks` are replaced.
        metadata: Whose tokens these are.
        fixed_order: The result must not depend on how a request's tokens are cut into steps.

    Returns:
        [T, Hv, V] of the dtype of `mixed`. Rows of padding are zero.
    """
    q, k, v = split_heads(mixed.float(), states)
    decay, rate = decay_and_rate(gates, a_log, dt_bias)
    out = torch.zeros(v.shape)
    requests = list(requests_of(metadata))
    if not requests:
        return out.to(mixed.dtype)
    starts, stops, blocks = (torch.tensor([r[i] for r in requests]) for i in range(3))
    goes_on = torch.tensor([r[3] for r in requests])
    found = torch.where(goes_on[:, None, None, None], states[blocks], 0.0)
    for i in range(int((stops - starts).max())):
        active = torch.nonzero(stops - starts > i).flatten()
        token = starts[active] + i
        state = found[active] * decay[token][:, :, None, None]
        known = (state * k[token][..., None]).sum(-2)
        change = (v[token] - known) * rate[token][..., None]
        state = state + k[token][..., None] * change[..., None, :]
        out[token] = (state * q[token][..., None]).sum(-2)
        found[active] = state
    states[blocks] = found
    return out.to(mixed.dtype)


def split_heads(mixed: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries and keys [T, Hv, K] of unit length, queries scaled, and values [T, Hv, V]."""
    _, num_values, key_dim, value_dim = states.shape
    num_keys = (mixed.shape[1] - num_values * value_dim) // (2 * key_dim)
    sizes = [num_keys * key_dim, num_keys * key_dim, num_values * value_dim]
    q, k, v = (
        part.reshape(len(mixed), heads, -1)
        for part, heads in zip(
            torch.split(mixed, sizes, dim=1), (num_keys, num_keys, num_values), strict=True
        )
    )
    repeats = num_values // num_keys
    q = (_unit(q) * key_dim**-0.5).repeat_interleave(repeats, dim=1)
    return q, _unit(k).repeat_interleave(repeats, dim=1), v


def decay_and_rate(gates: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns exp(g) and beta, [T, Hv] float32."""
    b, a = gates.float().chunk(2, dim=1)
    return torch.exp(-a_log.exp() * softplus(a + dt_bias)), sigmoid(b)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each head to unit mean square and by `weight`, then by the SiLU of its gate.

    Args:
        x: [T, H, V].
        gate: [T, H * V].
        weight: [V].
        eps: Added to the mean square.

    Returns:
        [T, H * V].
    """
    normed = F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
    return (normed.flatten(1) * silu(gate.float())).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def requests_of(metadata: StateMetadata) -> list[tuple[int, int, int, bool]]:
    """Returns (first token, behind the last one, block, whether it has a state) of each request."""
    bounds = metadata.query_start_loc.tolist()
    columns = metadata.seq_lens.tolist(), metadata.blocks.tolist()
    return [
        (start, stop, block, seq_len > stop - start)
        for start, stop, seq_len, block in zip(bounds[:-1], bounds[1:], *columns, strict=True)
        if seq_len > 0 and stop > start
    ]
