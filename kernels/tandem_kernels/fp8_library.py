"""FP8 GEMMs of the library: many rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

FAST_ACCUMULATION = True
"""Sums stay in the matrix units' own registers, of some 14 bits, as peers have them."""


def scaled_mm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `reference.fp8_linear.fp8_gemm`. With blocks, the number of rows is a multiple of 4, and
    w_scales is [N / 128, a multiple of 4]: the library takes it for granted."""
    if w_scales.dim() == 1:
        return torch._scaled_mm(
            x,
            weight.t(),
            scale_a=x_scales.view(-1, 1),
            scale_b=w_scales.view(1, -1),
            bias=bias,
            out_dtype=out_dtype,
            use_fast_accum=FAST_ACCUMULATION,
        )
    return block_scaled_mm(x, x_scales, weight, w_scales, bias, out_dtype)


def block_scaled_mm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiplies by weights with scales of 128 x 128."""
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
