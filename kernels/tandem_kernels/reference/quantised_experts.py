"""Experts whose weights are quantised, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.clamped_gate import ClampedGate
from tandem_kernels.mxfp4_tiles import untile_mxfp4
from tandem_kernels.reference.experts import activated, fused_experts

_GROUP = 128
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises rows to float8 e4m3; each 128 numbers share a scale.

    Args:
        x: [T, K].

    Returns:
        (numbers [T, K] e4m3, scales [T, ceil(K / 128)] float32), whose product is `x`, rounded.
    """
    num_rows, width = x.shape
    num_groups = -(-width // _GROUP)
    padded = x.new_zeros((num_rows, num_groups * _GROUP), dtype=torch.float32)
    padded[:, :width] = x
    grouped = padded.view(num_rows, num_groups, _GROUP)
    largest = grouped.abs().amax(-1)
    scales = torch.where(largest > 0, largest / _LARGEST, 1.0)
    numbers = (grouped / scales[..., None]).clamp(-_LARGEST, _LARGEST)
    return numbers.view(num_rows, -1)[:, :width].to(torch.float8_e4m3fn), scales


def fp8_experts(
    x: Tensor,
    w13: Tensor,
    s13: Tensor,
    w2: Tensor,
    s2: Tensor,
    weights: Tensor,
    experts: Tensor,
    fixed_order: bool = False,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate: ClampedGate | None = None,
) -> Tensor:
    """Computes the weighted sum of each token's experts, as `fused_experts` does. What goes into
    either projection is quantised by `quantise_rows`.

    Args:
        x: [T, H].
        w13: [E, 2, I, H] e4m3: of each expert its gate, then its up projection.
        s13: [E, 2, ceil(I / 128), ceil(H / 128)] float32, a scale for each block of the weight, or
            [E, 2, I], one for each output.
        w2: [E, H, I] e4m3.
        s2: [E, ceil(H / 128), ceil(I / 128)] or [E, H], as `s13`.
        weights, experts, fixed_order, b13, b2, gate: As in `fused_experts`.

    Returns:
        [T, H] in the dtype of `x`.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(experts.flatten().tolist()) - {-1}):
        token, place = torch.where(experts == expert)
        gates, ups = (_product(x[token], w13[expert, i], s13[expert, i]) for i in (0, 1))
        if b13 is not None:
            first, last = b13[expert].float().chunk(2)
            gates, ups = gates + first, ups + last
        part = _product(activated(gates, ups, gate).to(x.dtype), w2[expert], s2[expert])
        if b2 is not None:
            part = part + b2[expert].float()
        out.index_add_(0, token, part * weights[token, place, None])
    return out.to(x.dtype)


def _product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Computes [n, K] times [N, K] -> [n, N] float32. A sum of float64 does not depend on the
    batch."""
    numbers, shares = quantise_rows(x)
    given = numbers.float() * shares.repeat_interleave(_GROUP, 1)[:, : x.shape[1]]
    return (given.double() @ dequantise_fp8(weight, scales).double().t()).float()


def dequantise_fp8(weight: Tensor, scales: Tensor) -> Tensor:
    """Computes a weight [N, K] in float32 from e4m3 and scales of its blocks of 128 x 128, or one
    for each output [N]."""
    if scales.dim() == 1:
        return weight.float() * scales[:, None]
    spread = scales.repeat_interleave(_GROUP, 0).repeat_interleave(_GROUP, 1)
    return weight.float() * spread[: weight.shape[0], : weight.shape[1]]


def mxfp4_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    width: int,
    weights: Tensor,
    experts: Tensor,
    fixed_order: bool = False,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate: ClampedGate | None = None,
) -> Tensor:
    """Computes the weighted sum of each token's experts, as `fused_experts` does.

    Args:
        x: [T, H].
        w13: [E, 2, ...] int32, tiles (`mxfp4_tiles`) of each expert's gate, then its up projection,
            [I, H].
        w2: [E, ...], those of [H, I].
        width: I.
        weights, experts, fixed_order, b13, b2, gate: As in `fused_experts`.

    Returns:
        [T, H] in the dtype of `x`.
    """
    hidden = x.shape[1]
    plain13 = x.new_zeros((len(w13), 2 * width, hidden))
    plain2 = x.new_zeros((len(w2), hidden, width))
    for expert in set(experts.flatten().tolist()) - {-1}:
        gates, ups = (untile_mxfp4(part, width, hidden) for part in w13[expert])
        plain13[expert] = torch.cat((gates, ups))
        plain2[expert] = untile_mxfp4(w2[expert], hidden, width)
    return fused_experts(x, plain13, plain2, weights, experts, fixed_order, b13, b2, gate)
