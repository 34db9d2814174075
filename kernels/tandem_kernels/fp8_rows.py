"""Rows in float8 e4m3: each 128 numbers of a row share a scale, their largest magnitude / 448."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 128
"""Numbers of a row that share a scale."""


@triton.jit
def fp8_scale(largest: tl.tensor) -> tl.tensor:
    """Returns the scale of numbers up to `largest`; of zeros 1."""
    return tl.where(largest > 0, largest / 448.0, 1.0)


@triton.jit
def to_fp8(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Returns `x` / `scale`, rounded. A quotient may come out above 448 by an error of rounding,
    which some conversions make NaN."""
    return tl.clamp(x / scale, -448.0, 448.0).to(tl.float8e4nv)


@triton.jit
def quantise_rows_kernel(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    width: tl.tensor,
    num_groups: tl.tensor,
    x_stride: tl.tensor,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Quantises, in program (t, j), groups j * GROUPS and on of row t."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = col < width
    given = tl.load(x + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    scale = fp8_scale(tl.max(tl.abs(given), axis=1))
    tl.store(out + row * width + col, to_fp8(given, scale[:, None]), mask=inside)
    tl.store(scales + row * num_groups + group, scale, mask=group < num_groups)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.quantised_experts.quantise_rows`."""
    num_rows, width = x.shape
    num_groups = triton.cdiv(width, GROUP)
    out = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_rows, num_groups), dtype=torch.float32, device=x.device)
    groups = min(16, triton.next_power_of_2(num_groups))
    if num_rows > 0:
        quantise_rows_kernel[(num_rows, triton.cdiv(num_groups, groups))](
            x, out, scales, width, num_groups, x.stride(0), GROUP=GROUP, GROUPS=groups, num_warps=4
        )
    return out, scales
