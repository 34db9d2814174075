"""Rows quantised to FP8 or INT8, alone and with what computes them: norms and gated activations.

A row is read once: its program has it whole, finds the largest number of each group, and writes
e4m3 numbers and the groups' scales. Without groups a row has one scale, as it has in int8. Norm
and activation take unscaled products (`reference.fp8_linear`), too, and scale them as they read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import num_programs, uses_pdl
from tandem_kernels.gemm.fp8_library import ALIGNED_ROWS
from tandem_kernels.gemm.fp8_rows import fp8_scale, int8_scale, to_int8

E4M3 = torch.float8_e4m3fn


@triton.jit
def _quantise(
    value: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    scales_stride: tl.tensor,
    row: tl.tensor,
    width: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Writes `value` [BLOCK], zero behind `width`, as row `row`; scale g goes to
    scales[g, row]."""
    groups = tl.reshape(value, [BLOCK // GROUP, GROUP])
    largest = tl.max(tl.abs(groups), axis=1)
    column = tl.arange(0, BLOCK)
    to = numbers + row * width + column
    # One division a group. The largest number is off 448 or 127 by an error of rounding at most,
    # which is less than half a step.
    if numbers.dtype.element_ty == tl.int8:
        scale = int8_scale(largest)
        scaled = tl.reshape(groups * (1.0 / scale)[:, None], [BLOCK])
        tl.store(to, to_int8(scaled), mask=column < width)
    else:
        scale = fp8_scale(largest)
        scaled = tl.reshape(groups * (1.0 / scale)[:, None], [BLOCK])
        tl.store(to, scaled.to(numbers.dtype.element_ty), mask=column < width)
    group = tl.arange(0, BLOCK // GROUP)
    tl.store(scales + group * scales_stride + row, scale, mask=group * GROUP < width)


@triton.jit(do_not_specialize=["scales_stride"])
def quantise_fp8_kernel(
    x: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    x_stride: tl.tensor,
    scales_stride: tl.tensor,
    width: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Quantises one row in each program."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + column, mask=column < width, other=0.0)
    _quantise(value.to(tl.float32), numbers, scales, scales_stride, row, width, GROUP, BLOCK)


@triton.jit(do_not_specialize=["scales_stride"])
def rms_norm_fp8_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    row_scales: tl.tensor,
    col_scales: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    scales_stride: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    UNSCALED: tl.constexpr,
    QUANTISE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Normalises and quantises one row in each program. With a residual, its row becomes the sum,
    and the sum, rounded, is normalised. The norm is rounded once.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    kind = x.dtype.element_ty
    if OVERLAP:
        gdc_launch_dependents()
    of_norm = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if UNSCALED:
        of_column = tl.load(col_scales + column, mask=inside, other=0.0)
    if OVERLAP:
        gdc_wait()
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if UNSCALED:
        wide = wide * tl.load(row_scales + row) * of_column
    if HAS_RESIDUAL:
        place = residual + row * residual_stride + column
        wide += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, wide.to(kind), mask=inside)
    wide = wide.to(kind).to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / width
    normed = wide * (1.0 / tl.sqrt_rn(mean_square + eps)) * of_norm
    if QUANTISE:
        _quantise(normed, numbers, scales, scales_stride, row, width, GROUP, BLOCK)
    else:
        tl.store(numbers + row * width + column, normed.to(kind), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "scales_stride"])
def silu_and_mul_fp8_kernel(
    x: tl.tensor,
    row_scales: tl.tensor,
    col_scales: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    scales_stride: tl.tensor,
    width: tl.tensor,
    UNSCALED: tl.constexpr,
    GELU: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Activates and quantises every n-th row in each program, of which there are fewer
    where rows are many: with STAGES 2, the next row is on its way while one is computed."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    if OVERLAP:
        gdc_launch_dependents()
    if UNSCALED:
        of_gate = tl.load(col_scales + column, mask=inside, other=0.0)
        of_up = tl.load(col_scales + width + column, mask=inside, other=0.0)
    if OVERLAP:
        gdc_wait()
    first = tl.program_id(0).to(tl.int64)
    for row in tl.range(first, num_rows, tl.num_programs(0), num_stages=STAGES):
        gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
        if UNSCALED:
            of_row = tl.load(row_scales + row)
            gate *= of_row * of_gate
            up *= of_row * of_up
        # See `silu_and_mul_kernel`.
        steep = gate
        if GELU:
            steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        activated = gate / (1.0 + tl.exp(-steep)) * up
        _quantise(activated, numbers, scales, scales_stride, row, width, GROUP, BLOCK)


@triton.jit
def scale_product_kernel(
    product: tl.tensor,
    row_scales: tl.tensor,
    col_scales: tl.tensor,
    bias: tl.tensor,
    width: tl.tensor,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Scales, in program (t, j), columns j * BLOCK and on of row t, in place."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if OVERLAP:
        gdc_launch_dependents()
    of_column = tl.load(col_scales + column, mask=inside, other=0.0)
    if OVERLAP:
        gdc_wait()
    at = product + row * width + column
    scaled = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    scaled = scaled * tl.load(row_scales + row) * of_column
    if HAS_BIAS:
        scaled += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, scaled.to(product.dtype.element_ty), mask=inside)


def quantise_fp8(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """See `reference.fp8.quantise_fp8`."""
    return _quantise_rows(x, group, E4M3)


def quantise_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.int8.quantise_int8`."""
    return _quantise_rows(x, 0, torch.int8)


def _quantise_rows(x: Tensor, group: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    num_rows, width = x.shape
    numbers, scales = _outputs(x, width, group, kind)
    if num_rows > 0:
        overlap = uses_pdl(x.device, num_rows)
        quantise_fp8_kernel[(num_rows,)](
            x,
            numbers,
            scales,
            x.stride(0),
            scales.stride(0),
            width,
            **_shape(width, group),
            OVERLAP=overlap,
            **({"launch_pdl": True} if overlap else {}),
        )
    return numbers, scales


def rms_norm_fp8(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    group: int | None = 0,
    row_scales: Tensor | None = None,
    col_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.fp8_linear.rms_norm_fp8`."""
    return _rms_norm(x, residual, weight, eps, group, E4M3, row_scales, col_scales)


def rms_norm_int8(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    row_scales: Tensor | None = None,
    col_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.int8.rms_norm_int8`."""
    return _rms_norm(x, residual, weight, eps, 0, torch.int8, row_scales, col_scales)


def _rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    group: int | None,
    kind: torch.dtype,
    row_scales: Tensor | None,
    col_scales: Tensor | None,
) -> tuple[Tensor, Tensor]:
    num_rows, width = x.shape
    if group is None:
        numbers, scales = torch.empty_like(x), x.new_empty(0)
    else:
        numbers, scales = _outputs(x, width, group, kind)
    if num_rows > 0:
        overlap = uses_pdl(x.device, num_rows)
        rms_norm_fp8_kernel[(num_rows,)](
            x,
            residual,
            weight,
            row_scales,
            col_scales,
            numbers,
            scales,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            scales.stride(0),
            width,
            eps,
            HAS_RESIDUAL=residual is not None,
            UNSCALED=row_scales is not None,
            QUANTISE=group is not None,
            **_shape(width, group or 0),
            OVERLAP=overlap,
            **({"launch_pdl": True} if overlap else {}),
        )
    return numbers, scales


def silu_and_mul_fp8(
    x: Tensor,
    is_gelu: bool = False,
    group: int = 0,
    row_scales: Tensor | None = None,
    col_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.fp8_linear.silu_and_mul_fp8`."""
    return _activated(x, is_gelu, group, E4M3, row_scales, col_scales)


def silu_and_mul_int8(
    x: Tensor,
    is_gelu: bool = False,
    row_scales: Tensor | None = None,
    col_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.int8.silu_and_mul_int8`."""
    return _activated(x, is_gelu, 0, torch.int8, row_scales, col_scales)


def _activated(
    x: Tensor,
    is_gelu: bool,
    group: int,
    kind: torch.dtype,
    row_scales: Tensor | None,
    col_scales: Tensor | None,
) -> tuple[Tensor, Tensor]:
    num_rows, width = x.shape[0], x.shape[1] // 2
    numbers, scales = _outputs(x, width, group, kind)
    if num_rows > 0:
        overlap = uses_pdl(x.device, num_rows)
        # Scales of outputs take registers of which there are no more.
        programs = num_programs(x.device, 2 if row_scales is None else 1)
        silu_and_mul_fp8_kernel[(min(num_rows, programs),)](
            x,
            row_scales,
            col_scales,
            numbers,
            scales,
            num_rows,
            x.stride(0),
            scales.stride(0),
            width,
            UNSCALED=row_scales is not None,
            GELU=is_gelu,
            **_shape(width, group),
            OVERLAP=overlap,
            STAGES=1 if num_rows <= programs else 2,
            **({"launch_pdl": True} if overlap else {}),
        )
    return numbers, scales


def scale_product(
    product: Tensor, row_scales: Tensor, col_scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """See `reference.fp8_linear.scale_product`."""
    num_rows, width = product.shape
    if num_rows > 0:
        block = min(1024, triton.next_power_of_2(width))
        overlap = uses_pdl(product.device, num_rows)
        scale_product_kernel[(num_rows, triton.cdiv(width, block))](
            product,
            row_scales,
            col_scales,
            bias,
            width,
            HAS_BIAS=bias is not None,
            BLOCK=block,
            OVERLAP=overlap,
            num_warps=4,
            **({"launch_pdl": True} if overlap else {}),
        )
    return product


def _outputs(x: Tensor, width: int, group: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    num_rows = len(x)
    padded = -(-num_rows // ALIGNED_ROWS) * ALIGNED_ROWS
    numbers = torch.empty((padded, width), dtype=kind, device=x.device)
    num_groups = -(-width // group) if group else 1
    scales = torch.empty((num_groups, padded), dtype=torch.float32, device=x.device)
    return numbers[:num_rows], scales[:, :num_rows]


def _shape(width: int, group: int) -> dict[str, int]:
    block = max(triton.next_power_of_2(width), group)
    return {
        "GROUP": group or block,
        "BLOCK": block,
        "num_warps": min(max(block // 512, 1), 16),
    }
