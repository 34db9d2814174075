"""Products of few rows with a weight of each head, for both halves of latent attention.

A program has a few outputs of one head and all of the inner dimension. Its weights depend on
nothing, so they are on their way before the kernel in front has ended (PDL): what is left to wait
for is a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import uses_pdl
from tandem_kernels.product_precision import precision_of

_NUMBERS = 8192
"""A program has this many weights, which stay in registers while it waits."""


@triton.jit(do_not_specialize=["num_rows"])
def head_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    x_token_stride: tl.tensor,
    x_head_stride: tl.tensor,
    weight_head_stride: tl.tensor,
    in_stride: tl.tensor,
    out_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes, in program (j, h), outputs j * COLS and on of head h, of all rows."""
    head = tl.program_id(1)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    lane = tl.arange(0, BLOCK_INNER)
    row = tl.arange(0, ROWS)
    if OVERLAP:
        gdc_launch_dependents()
    places = weight + head.to(tl.int64) * weight_head_stride
    places += lane[:, None] * in_stride + col[None, :] * out_stride
    is_weight = (lane < INNER)[:, None] & (col < NUM_OUTPUTS)[None, :]
    by = tl.load(places, mask=is_weight, other=0.0)
    if OVERLAP:
        gdc_wait()
    places = x + row.to(tl.int64)[:, None] * x_token_stride + head * x_head_stride + lane[None, :]
    real = (row < num_rows)[:, None]
    given = tl.load(places, mask=real & (lane < INNER)[None, :], other=0.0)
    acc = tl.dot(given, by, input_precision=PRECISION)
    line = row.to(tl.int64) * tl.num_programs(1) + head
    to = out + line[:, None] * NUM_OUTPUTS + col[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real & (col < NUM_OUTPUTS)[None, :])


def head_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """See `reference.gemm.head_gemm`; only for what `few_row_shapes.takes_by_head` says."""
    num_rows = len(x)
    num_heads, inner, num_outputs = weight.shape
    out = torch.empty((num_rows, num_heads, num_outputs), dtype=x.dtype, device=x.device)
    block_inner = max(16, triton.next_power_of_2(inner))
    cols = max(16, min(_NUMBERS // block_inner, triton.next_power_of_2(num_outputs)))
    overlap = uses_pdl(x.device, num_rows)
    head_gemm_kernel[(triton.cdiv(num_outputs, cols), num_heads)](
        x,
        weight,
        out,
        num_rows,
        *x.stride()[:2],
        *weight.stride(),
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        COLS=cols,
        INNER=inner,
        BLOCK_INNER=block_inner,
        NUM_OUTPUTS=num_outputs,
        PRECISION=precision_of(x),
        OVERLAP=overlap,
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )
    return out
