"""Experts whose weights are quantised, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.elementwise.gate_form import GateForm
from tandem_kernels.gemm.fp4_tiles import untile_fp4
from tandem_kernels.reference.experts import activated, fused_experts, of_tokens, route_tokens
from tandem_kernels.reference.fp8 import BLOCK, dequantise_weight, quantise_fp8
from tandem_kernels.reference.layouts import kernel_takes


@kernel_takes(
    x="T | H",
    w13="E _ I H",
    s13="E _ _: float32 or E _ _ _: float32",
    w2="E H I",
    s2="E _: float32 or E _ _: float32",
    weights="T k: float32",
    experts="T k: int32",
    b13="E _",
    b2="E H",
)
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
    gate: GateForm | None = None,
    summed: bool = True,
    ranks: int = 1,
) -> Tensor:
    """Computes the weighted sum of each token's experts, as `fused_experts` does. What goes into
    either projection is quantised by `quantise_fp8`, each 128 numbers of a row.

    Args:
        x: [T, H].
        w13: [E, 2, I, H] e4m3: of each expert its gate, then its up projection.
        s13: [E, 2, ceil(I / 128), ceil(H / 128)] float32, a scale for each block of the weight, or
            [E, 2, I], one for each output.
        w2: [E, H, I] e4m3.
        s2: [E, ceil(H / 128), ceil(I / 128)] or [E, H], as `s13`.
        weights, experts, fixed_order, b13, b2, gate, summed, ranks: As in `fused_experts`.

    Returns:
        What `fused_experts` returns.
    """
    outputs = x.new_zeros((*experts.shape, x.shape[1]), dtype=torch.float32)
    for expert in sorted(set(experts.flatten().tolist()) - {-1}):
        token, place = torch.where(experts == expert)
        gates, ups = (_product(x[token], w13[expert, i], s13[expert, i]) for i in (0, 1))
        if b13 is not None:
            first, last = b13[expert].float().chunk(2)
            gates, ups = gates + first, ups + last
        part = _product(activated(gates, ups, gate).to(x.dtype), w2[expert], s2[expert])
        if b2 is not None:
            part = part + b2[expert].float()
        outputs[token, place] = part * weights[token, place, None]
    return of_tokens(outputs, summed).to(x.dtype)


def _product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Computes [n, K] times [N, K] -> [n, N] float32. A sum of float64 does not depend on the
    batch."""
    numbers, shares = quantise_fp8(x, BLOCK)
    given = numbers.float() * shares.t().repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    return (given.double() @ dequantise_weight(weight, scales).double().t()).float()


@kernel_takes(
    x="T | H",
    w13="E _ _ _ _: int32",
    w2="E _ _ _: int32",
    weights="T k: float32",
    experts="T k: int32",
    b13="E _",
    b2="E H",
    f13="E _: float32",
    f2="E: float32",
)
def fp4_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    width: int,
    weights: Tensor,
    experts: Tensor,
    fixed_order: bool = False,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate: GateForm | None = None,
    summed: bool = True,
    f13: Tensor | None = None,
    f2: Tensor | None = None,
    ranks: int = 1,
) -> Tensor:
    """Computes the weighted sum of each token's experts, as `fused_experts` does.

    Args:
        x: [T, H].
        w13: [E, 2, ...] int32, tiles (`gemm.fp4_tiles`) of each expert's gate, then its up
            projection, [I, H].
        w2: [E, ...], those of [H, I].
        width: I.
        weights, experts, fixed_order, b13, b2, gate, summed, ranks: As in `fused_experts`. Experts
            of few rows may be summed in any case: `fp4.pair_shapes.sums_itself`.
        f13, f2: Of NVFP4: [E, 2] and [E] float32, by which the sums of products with a weight's
            tiles are multiplied (`NVFP4_FACTOR` times its factor).

    Returns:
        What `fused_experts` returns.
    """
    hidden = x.shape[1]
    plain13 = x.new_zeros((len(w13), 2 * width, hidden))
    plain2 = x.new_zeros((len(w2), hidden, width))
    for expert in set(experts.flatten().tolist()) - {-1}:
        of_up = (None, None) if f13 is None else f13[expert]
        gates, ups = (
            untile_fp4(part, width, hidden, factor)
            for part, factor in zip(w13[expert], of_up, strict=True)
        )
        plain13[expert] = torch.cat((gates, ups))
        plain2[expert] = untile_fp4(w2[expert], hidden, width, None if f2 is None else f2[expert])
    return fused_experts(x, plain13, plain2, weights, experts, fixed_order, b13, b2, gate, summed)


@kernel_takes(
    x="T | H",
    logits="T E: float32",
    slot_mapping="T: int",
    residual="T H",
    w13="E _ _ _ _: int32",
    w2="E _ _ _: int32",
    b13="E _",
    b2="E H",
    f13="E _: float32",
    f2="E: float32",
)
def fp4_routed_experts(
    x: Tensor,
    logits: Tensor,
    slot_mapping: Tensor,
    residual: Tensor,
    w13: Tensor,
    w2: Tensor,
    width: int,
    top_k: int,
    *,
    renormalise: bool = True,
    scaling: float = 1.0,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate: GateForm | None = None,
    f13: Tensor | None = None,
    f2: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses each token's experts, and adds the weighted sum of what they compute to `residual`.

    Args:
        x: [T, H], normed.
        logits, slot_mapping, top_k, renormalise, scaling: As in `route_tokens`.
        residual: [T, H] in the dtype of `x`, contiguous; the sum is rounded before it is added.
        w13, w2, width, b13, b2, gate, f13, f2: As in `fp4_experts`.

    Returns:
        (weights, experts) as `route_tokens` returns them.
    """
    weights, experts = route_tokens(
        logits, slot_mapping, None, top_k, renormalise=renormalise, scaling=scaling
    )
    residual += fp4_experts(
        x, w13, w2, width, weights, experts, False, b13, b2, gate, True, f13, f2
    )
    return weights, experts
