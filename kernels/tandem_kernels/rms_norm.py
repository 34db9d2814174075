"""RMSNorm, alone and fused with the addition to the residual stream.

The addend may come in parts, as a product whose inner dimension was cut leaves it: their sum is
rounded to the residual's dtype, as the product itself would have been.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import ahead_bytes, chains_launches
from tandem_kernels.narrow_shapes import MAX_ROWS
from tandem_kernels.prefetch import PROGRAMS, ask_for_rows, lines_of


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    ahead: tl.tensor,
    num_rows: tl.tensor,
    ahead_rows: tl.tensor,
    ahead_inner: tl.tensor,
    x_stride: tl.tensor,
    part_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    hidden_size: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LINES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One row a program. With a residual, its row becomes the sum, and the sum is normalised.

    Programs behind the rows ask for LINES lines of each row of `ahead`.
    """
    if LINES > 0:
        spare = tl.program_id(0) - num_rows
        if spare >= 0:
            if OVERLAP:
                gdc_launch_dependents()
            others = tl.num_programs(0) - num_rows
            ask_for_rows(ahead, spare, others, ahead_rows, ahead_inner, LINES, 256)
            if OVERLAP:
                gdc_wait()
            return
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden_size
    kind = out.dtype.element_ty
    if OVERLAP:
        gdc_launch_dependents()
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        place = x + part * part_stride + row * x_stride + column
        value += tl.load(place, mask=inside, other=0.0)
    value = value.to(kind)
    if HAS_RESIDUAL:
        place = residual + row * residual_stride + column
        carried = tl.load(place, mask=inside, other=0.0)
        value = (value.to(tl.float32) + carried.to(tl.float32)).to(kind)
        tl.store(place, value, mask=inside)
    wide = value.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / hidden_size
    normed = wide * (1.0 / tl.sqrt_rn(mean_square + eps)) * scale
    tl.store(out + row * out_stride + column, normed.to(kind), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.elementwise.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    hidden_size = x.shape[-1]
    rows = x.view(1, -1, hidden_size)
    if rows.shape[1] > 0:
        _launch(rows, None, weight, out.view(-1, hidden_size), eps)
    return out


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, ahead: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `reference.elementwise.fused_add_rms_norm`. The norm lands in the memory of `x`."""
    if x.shape[0] > 0:
        _launch(x[None], residual, weight, x, eps, ahead)
    return x, residual


def add_parts_rms_norm(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `reference.elementwise.add_parts_rms_norm`."""
    out = torch.empty_like(residual)
    if out.shape[0] > 0:
        _launch(parts, residual, weight, out, eps)
    return out, residual


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    eps: float,
    ahead: Tensor | None = None,
) -> None:
    num_parts, num_rows, hidden_size = x.shape
    lines = lines_of(ahead, ahead_bytes(x.device)) if num_rows <= MAX_ROWS else 0
    spare = PROGRAMS if lines > 0 else 0
    block = triton.next_power_of_2(hidden_size)
    overlap = chains_launches(x.device, num_rows)
    rms_norm_kernel[(num_rows + spare,)](
        x,
        residual,
        weight,
        out,
        ahead if lines > 0 else None,
        num_rows,
        ahead.shape[0] if ahead is not None else 0,
        ahead.shape[1] if ahead is not None else 0,
        x.stride(1),
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        hidden_size,
        eps,
        HAS_RESIDUAL=residual is not None,
        PARTS=num_parts,
        BLOCK=block,
        LINES=lines,
        OVERLAP=overlap,
        num_warps=min(max(block // 512, 1), 16),
        **({"launch_pdl": True} if overlap else {}),
    )
