"""Weights of 8-bit integers beside rows in half precision: few rows are multiplied as weights are
unpacked, and for many the weights are written out.

A weight is (number - zero) * scale of its group of inputs. The difference has at most 8 bits and is
exact in half precision, so products are of that, and sums of a group are scaled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import uses_pdl
from tandem_kernels.elementwise.silu_and_mul import silu_and_mul

MAX_ROWS = 64
"""The kernel of few rows has a tile of all rows."""
_COLS = 32
_WRITTEN = 1024


@triton.jit(do_not_specialize=["num_rows"])
def int8_weight_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    group_size: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    IN_GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes outputs j * COLS and on in program j. Scales and zeros are [K / group_size,
    num_outputs]; IN_GROUPS: there are several, and DEPTH inputs are of one."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    real_col = col < num_outputs
    row = tl.arange(0, ROWS)
    real = (row < num_rows)[:, None]
    lane = tl.arange(0, DEPTH)
    inputs = x + row[:, None] * x_stride
    places = weight + col.to(tl.int64)[:, None] * inner
    kind = x.dtype.element_ty
    acc = tl.zeros([ROWS, COLS], tl.float32)
    scale = tl.load(scales + col, mask=real_col, other=0.0)
    if HAS_ZEROS:
        zero = tl.load(zeros + col, mask=real_col, other=0).to(kind)
    for start in range(0, inner, DEPTH):
        k = start + lane
        if EVEN:
            given = tl.load(inputs + k[None, :], mask=real, other=0.0)
            numbers = tl.load(places + k[None, :])
        else:
            real_k = (k < inner)[None, :]
            given = tl.load(inputs + k[None, :], mask=real & real_k, other=0.0)
            numbers = tl.load(places + k[None, :], mask=real_col[:, None] & real_k, other=0)
        numbers = numbers.to(kind)
        if IN_GROUPS:
            of_group = start // group_size * num_outputs + col
            scale = tl.load(scales + of_group, mask=real_col, other=0.0)
            if HAS_ZEROS:
                zero = tl.load(zeros + of_group, mask=real_col, other=0).to(kind)
        if HAS_ZEROS:
            numbers = numbers - zero[:, None]
        if IN_GROUPS:
            acc += tl.dot(given, tl.trans(numbers)) * scale[None, :]
        else:
            acc = tl.dot(given, tl.trans(numbers), acc)
    if not IN_GROUPS:
        acc *= scale[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + col, mask=real_col, other=0.0).to(tl.float32)[None, :]
    to = out + row[:, None] * num_outputs + col[None, :]
    tl.store(to, acc.to(kind), mask=real & real_col[None, :])


@triton.jit
def int8_dequantise_kernel(
    weight: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    out: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    group_size: tl.tensor,
    HAS_ZEROS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Writes inputs b * BLOCK and on of output n, in program (n, b)."""
    col = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < inner
    wide = tl.load(weight + col * inner + k, mask=inside, other=0).to(tl.float32)
    of_group = k // group_size * num_outputs + col
    if HAS_ZEROS:
        wide -= tl.load(zeros + of_group, mask=inside, other=0).to(tl.float32)
    wide *= tl.load(scales + of_group, mask=inside, other=0.0)
    tl.store(out + col * inner + k, wide.to(out.dtype.element_ty), mask=inside)


def int8_weight_gemm(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    """See `reference.int8.int8_weight_gemm`; of at most `MAX_ROWS` rows. Groups are multiples of
    32."""
    num_rows, inner = x.shape
    num_outputs = len(weight)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    group_size = inner // len(scales)
    in_groups = len(scales) > 1
    depth = next(size for size in (128, 64, 32) if not in_groups or group_size % size == 0)
    overlap = uses_pdl(x.device, num_rows)
    int8_weight_gemm_kernel[(triton.cdiv(num_outputs, _COLS),)](
        x,
        weight,
        scales,
        zeros,
        bias,
        out,
        num_rows,
        num_outputs,
        inner,
        x.stride(0),
        group_size,
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        COLS=_COLS,
        DEPTH=depth,
        IN_GROUPS=in_groups,
        HAS_ZEROS=zeros is not None,
        HAS_BIAS=bias is not None,
        EVEN=inner % depth == 0 and num_outputs % _COLS == 0,
        OVERLAP=overlap,
        num_warps=4,
        num_stages=4,
        **({"launch_pdl": True} if overlap else {}),
    )
    return out


def int8_weight_gate_up(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """See `reference.int8.int8_weight_gate_up`."""
    return silu_and_mul(int8_weight_gemm(x, weight, scales, zeros))


def int8_dequantise(
    weight: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See `reference.int8.int8_dequantise`."""
    num_outputs, inner = weight.shape
    out = torch.empty((num_outputs, inner), dtype=dtype, device=weight.device)
    int8_dequantise_kernel[(num_outputs, triton.cdiv(inner, _WRITTEN))](
        weight,
        scales,
        zeros,
        out,
        num_outputs,
        inner,
        inner // len(scales),
        HAS_ZEROS=zeros is not None,
        BLOCK=_WRITTEN,
        num_warps=4,
    )
    return out
