"""Linear attention by the gated delta rule in plain torch, one token after the other.

All of it is computed in float32 and rounded once. Source: Yang et al., Gated Delta Networks, 2024.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.reference.gemm import few_row_gemm
from tandem_kernels.reference.layouts import STATES, kernel_takes
from tandem_kernels.reference.state_runs import Lockstep, state_runs, windows_of
from tandem_kernels.reference.steady import sigmoid, silu, softplus

L2_EPS = 1e-6
"""Added to the sum of squares when queries and keys are normalised."""


@kernel_takes(x="_ | C", weight="C W", states="_ | C _", metadata=STATES, bias="C", kept="_ _ C")
def causal_conv(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    bias: Tensor | None = None,
    activates: bool = True,
    kept: Tensor | None = None,
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
        kept: `KeptInputs.convolved`, which decodes read and write; None: nothing is pending.

    Returns:
        [T, C], and of decodes with pending tokens the rows that `state_metadata` draws: [T +
        num_pending_rows, C]. Rows of padding, and those in front of the pending ones, are zero.
    """
    width, runs = weight.shape[1], state_runs(metadata)
    out = x.new_zeros((len(x) + metadata.num_pending_rows, x.shape[1]))
    if runs is None:
        return out
    windows = windows_of(runs, width)
    blocks = runs.blocks(metadata)
    before = torch.where(runs.goes_on[:, None, None], states[blocks], 0.0).transpose(1, 2)
    parts = runs.with_pending(x.to(states.dtype), kept)
    # All runs at once: windows that begin in one and end in the next are left out below.
    inputs = torch.cat((before.flatten(0, 1), *parts)).index_select(0, windows.sources)
    wide, taps = inputs.float(), weight.float().unbind(1)
    total = sum(wide[i : len(wide) - width + 1 + i] * tap for i, tap in enumerate(taps))
    assert isinstance(total, Tensor)
    total = total if bias is None else total + bias.float()
    total = (silu(total) if activates else total).to(x.dtype)
    out[runs.lines] = total.index_select(0, windows.begins)
    states[blocks] = inputs[windows.stay].transpose(1, 2)
    return out


@kernel_takes(x="T | K", weight="N K", taps="C W", states="_ | C _", metadata=STATES, bias="C")
def few_row_conv(
    x: Tensor,
    weight: Tensor,
    taps: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    first: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """Projects few rows, of requests of one token each, and convolves some of the outputs.

    Args:
        x: [T, K].
        weight: [N, K].
        taps, states, bias: Of `causal_conv`, of C channels.
        first: Outputs `first` and on are the channels.

    Returns:
        [T, N]: channels as `causal_conv` returns them, with their SiLU, and the other outputs. Rows
        of padding are anything.
    """
    out = few_row_gemm(x, weight)
    channels = out[:, first : first + len(taps)]
    channels.copy_(causal_conv(channels, taps, states, metadata, bias))
    return out


@kernel_takes(
    mixed="_ | _",
    gates="T | _",
    a_log="H: float32",
    dt_bias="_: float32",
    states="_ | H _ _: float32",
    metadata=STATES,
    kept="_ _ _",
    decays="T | _",
)
def gated_delta_rule(
    mixed: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    fixed_order: bool = False,
    kept: Tensor | None = None,
    *,
    decays: Tensor | None = None,
    rate_scale: float = 1.0,
    decay_floor: float = 0.0,
) -> Tensor:
    """Take each token into its request's state, and read the state with its query.

        S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

    where g = -exp(a_log) softplus(a + dt_bias) and beta = rate_scale sigmoid(b). Queries and keys
    have unit length, and queries are divided by the root of K. Value head i has the query and key
    of head i // (value heads per key head). In Kimi Delta Attention (Kimi Linear, arXiv 2510.26692)
    each row of S decays by itself: there g is of a key channel, not of a head. With a floor, as in
    Ling 3, g = decay_floor sigmoid(exp(a_log) (a + dt_bias)).

    Args:
        mixed: [T + num_pending_rows, 2 Hk K + Hv V], queries, keys and values, as `causal_conv`
            returns them.
        gates: [T, 2 Hv], b and a; or [T, Hv], b alone.
        a_log, dt_bias: [Hv] float32; dt_bias [Hv K] where each channel decays by itself.
        states: [N, Hv, K, V] float32; those of `metadata.blocks` are replaced.
        metadata: Whose tokens these are.
        fixed_order: The result must not depend on how a request's tokens are cut into steps.
        kept: `KeptInputs.gates`, which decodes read and write; None: nothing is pending.
        decays: [T, Hv K], a of each head's key channels; None: it is in `gates`, of heads.
        decay_floor: The least g, below 0, of channels; 0: there is none.
        rate_scale: 2 lets a token take out what it finds, and put in its opposite.

    Returns:
        [T, Hv, V] of the dtype of `mixed`. Rows of padding are zero.
    """
    runs = state_runs(metadata)
    _, num_values, _, value_dim = states.shape
    out = mixed.new_zeros((len(gates), num_values, value_dim))
    if runs is None:
        return out
    gates = gates if decays is None else torch.cat((gates, decays), dim=1)
    walk = Lockstep(runs, states, metadata)
    q, k, v = split_heads(mixed[walk.lines].float(), states)
    decay, rate = decay_and_rate(walk.gates(gates, kept), a_log, dt_bias, decay_floor)
    tokens = q[..., None], k[..., None], v, decay[..., None], (rate_scale * rate)[..., None]
    read = []
    for queries, keys, values, decays, rates in zip(*map(walk.steps, tokens), strict=True):
        state = walk.states() * decays
        change = (values - (state * keys).sum(-2)) * rates
        state = state + keys * change[..., None, :]
        read.append((state * queries).sum(-2))
        walk.go(state)
    walk.end(read, out)
    return out


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


def decay_and_rate(
    gates: Tensor, a_log: Tensor, dt_bias: Tensor, floor: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Returns exp(g), [T, Hv, 1] float32 or [T, Hv, K], and the sigmoid of b, [T, Hv] float32."""
    heads = len(a_log)
    b, a = gates[:, :heads].float(), gates[:, heads:].float()
    scale, of_heads = a_log.exp()[:, None], (a + dt_bias).view(len(a), heads, -1)
    if floor < 0:
        return torch.exp(floor * sigmoid(scale * of_heads)), sigmoid(b)
    return torch.exp(-scale * softplus(of_heads)), sigmoid(b)


@kernel_takes(x="T _ D |", gate="T | _", weight="D")
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, is_sigmoid: bool = False
) -> Tensor:
    """Scale each head to unit mean square and by `weight`, then by the SiLU of its gate.

    Args:
        x: [T, H, V].
        gate: [T, H * V].
        weight: [V].
        eps: Added to the mean square.
        is_sigmoid: By the sigmoid of the gate, not its SiLU.

    Returns:
        [T, H * V].
    """
    normed = F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
    factor = sigmoid(gate.float()) if is_sigmoid else silu(gate.float())
    return (normed.flatten(1) * factor).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
