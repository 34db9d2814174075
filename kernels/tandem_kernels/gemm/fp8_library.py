"""FP8 GEMMs of the library: many rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

ALIGNED_ROWS = 4
"""GEMMs on groups want multiples of this many rows."""
FAST_ACCUMULATION = True
"""Sums stay in the matrix units' own registers, of some 14 bits, as peers have them."""


def fp8_product(x: Tensor, weight: Tensor) -> Tensor:
    """See `reference.fp8_linear.fp8_product`."""
    scale = one(x.device)
    return torch._scaled_mm(
        x,
        weight.t(),
        scale_a=scale,
        scale_b=scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=FAST_ACCUMULATION,
    )


@cache
def one(device: torch.device) -> Tensor:
    """Returns the scale of what has none."""
    return torch.ones((), dtype=torch.float32, device=device)


def scaled_mm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `reference.fp8_linear.fp8_gemm`. Beside blocks, w_scales is [N / 128, a multiple of 4],
    and x lies in memory that goes on to a multiple of 4 rows."""
    if w_scales.dim() == 2:
        num_rows, inner = x.shape
        padded = -(-num_rows // ALIGNED_ROWS) * ALIGNED_ROWS
        x = x.as_strided((padded, inner), (inner, 1))
        x_scales = x_scales.as_strided((len(x_scales), padded), (padded, 1))
        return block_scaled_mm(x, x_scales, weight, w_scales, bias, out_dtype)[:num_rows]
    return torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scales.view(-1, 1),
        scale_b=w_scales.view(1, -1),
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=FAST_ACCUMULATION,
    )


def block_scaled_mm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiplies by weights with scales of 128 x 128, as the library wants the scales: what its
    shapes do not tell it takes for granted, and computes something else."""
    assert len(x) % 4 == 0 and w_scales.shape[1] % 4 == 0
    kinds = _kinds()
    product: Tensor = torch.nn.functional.scaled_mm(
        x,
        weight.t(),
        x_scales.t(),
        kinds.BlockWise1x128,
        w_scales.t(),
        kinds.BlockWise128x128,
        bias=bias,
        output_dtype=out_dtype,
    )
    return product


@cache
def _kinds() -> Any:
    from torch.nn.functional import ScalingType

    return ScalingType
