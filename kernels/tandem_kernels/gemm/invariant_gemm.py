"""A GEMM whose rows do not depend on each other, nor on how many there are.

Libraries choose an algorithm by the number of rows, and with it an order of additions: the same
row gives other bits in another batch. Here every GEMM is computed in tiles of one size, each
output as one sum in one order, so a row's bits are its own. Small batches pay for it: their tiles
are mostly empty, and few programs share the weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.product_precision import precision_of

ROWS, COLS, DEPTH = 64, 128, 64
_GROUP = 8
"""Tiles of rows that follow each other, so that their weights are still in the cache."""


@triton.jit(do_not_specialize=["num_rows"])
def invariant_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Computes one tile of the output in each program, GROUP tiles of rows by all tiles of columns
    at a time.
    """
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, ROWS)
    in_group = GROUP * tl.cdiv(num_outputs, COLS)
    first = program // in_group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    row = (first + program % in_group % height) * ROWS + tl.arange(0, ROWS)
    col = program % in_group // height * COLS + tl.arange(0, COLS)
    lane = tl.arange(0, DEPTH)
    real_row, real_col = (row < num_rows)[:, None], (col < num_outputs)[:, None]
    inputs = x + row.to(tl.int64)[:, None] * x_stride
    weights = weight + col.to(tl.int64)[:, None] * inner
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, inner, DEPTH):
        k = (start + lane)[None, :]
        given = tl.load(inputs + k, mask=real_row & (k < inner), other=0.0)
        factors = tl.load(weights + k, mask=real_col & (k < inner), other=0.0)
        acc = tl.dot(given, tl.trans(factors), acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + col, mask=col < num_outputs, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * num_outputs + col[None, :]
    real = real_row & (col < num_outputs)[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real)


def invariant_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """See `reference.gemm.invariant_gemm`."""
    num_rows, num_outputs = x.shape[0], weight.shape[0]
    out = torch.empty((num_rows, num_outputs), dtype=out_dtype or x.dtype, device=x.device)
    if num_rows == 0:
        return out
    grid = (triton.cdiv(num_rows, ROWS) * triton.cdiv(num_outputs, COLS),)
    invariant_gemm_kernel[grid](
        x,
        weight,
        bias,
        out,
        num_rows,
        num_outputs,
        weight.shape[1],
        x.stride(0),
        HAS_BIAS=bias is not None,
        PRECISION=precision_of(x),
        ROWS=ROWS,
        COLS=COLS,
        DEPTH=DEPTH if x.dtype != torch.float32 else DEPTH // 2,
        GROUP=_GROUP,
        num_warps=4,
        num_stages=4,
    )
    return out
