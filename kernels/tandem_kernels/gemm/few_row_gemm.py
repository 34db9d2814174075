"""Linear layers for few rows whatever their sizes: bias and residual stream included.

    rows up to 4    a program multiplies a few outputs' weights where they are loaded, in registers
    more            matrix units, weights as the first operand

A program goes through the whole inner dimension, so that nobody sums parts: that its outputs are
few makes enough programs for all SMs, with loads of each in flight. Up to four rows its first
weights are asked for before the kernel in front has ended (PDL), since they depend on nothing.

`small_m_gemm` needs whole tiles of 128 outputs and 256 inputs; this has no need of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import uses_pdl
from tandem_kernels.gemm.few_row_shapes import VECTOR

REGISTER_ROWS = 4
"""The most rows for which products in registers take less time than the weights' bytes."""


@dataclass(frozen=True, slots=True)
class FewRowTuning:
    """Says how one GEMM runs.

    Attributes:
        cols, depth: Outputs of a program, and how much of the inner dimension it takes at once.
        num_stages: Loads ahead, on matrix units.
    """

    cols: int
    depth: int
    num_warps: int
    num_stages: int = 1


def few_row_tuning(num_rows: int, num_outputs: int) -> FewRowTuning:
    """Returns what was quickest for the layers of gpt-oss-120b on an H200, with some programs for
    each of its 132 SMs. `python -m bench.engine.few_rows` times others."""
    few_outputs = num_outputs < 2048
    if num_rows > REGISTER_ROWS:
        return FewRowTuning(cols=16 if few_outputs else 32, depth=512, num_warps=4, num_stages=5)
    if few_outputs:
        return FewRowTuning(cols=2, depth=2048, num_warps=4)
    return FewRowTuning(cols=8 if num_outputs > 4096 else 2, depth=1024, num_warps=4)


@triton.jit(do_not_specialize=["num_rows"])
def few_row_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    VECTOR: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes, in program j, outputs j * COLS and on of all rows. ADDS: to what `out` has."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, DEPTH)
    real_col = (col < num_outputs)[:, None]
    real_row = (row < num_rows)[:, None]
    places = weight + col.to(tl.int64)[:, None] * inner + lane[None, :]
    inputs = x + row.to(tl.int64)[:, None] * x_stride + lane[None, :]
    if OVERLAP:
        gdc_launch_dependents()
    if IN_REGISTERS:
        ahead = tl.load(places, mask=real_col & (lane < inner)[None, :], other=0.0)
        if OVERLAP:
            gdc_wait()
        sums = tl.zeros([COLS, ROWS, DEPTH // VECTOR], tl.float32)
        for start in range(0, inner, DEPTH):
            by = ahead.to(tl.float32).reshape(COLS, 1, DEPTH // VECTOR, VECTOR)
            after = start + DEPTH
            inside = (after + lane < inner)[None, :]
            ahead = tl.load(places + after, mask=real_col & inside, other=0.0)
            inside = (start + lane < inner)[None, :]
            given = tl.load(inputs + start, mask=real_row & inside, other=0.0).to(tl.float32)
            sums += tl.sum(by * given.reshape(1, ROWS, DEPTH // VECTOR, VECTOR), axis=3)
        acc = tl.sum(sums, axis=2)
    else:
        if OVERLAP:
            gdc_wait()
        acc = tl.zeros([COLS, ROWS], tl.float32)
        for start in range(0, inner, DEPTH):
            inside = (start + lane < inner)[None, :]
            given = tl.load(inputs + start, mask=real_row & inside, other=0.0)
            by = tl.load(places + start, mask=real_col & inside, other=0.0)
            acc = tl.dot(by, given.T, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + col, mask=col < num_outputs, other=0.0).to(tl.float32)[:, None]
    to = out + row.to(tl.int64)[None, :] * out_stride + col[:, None]
    written = real_col & (row < num_rows)[None, :]
    if ADDS:
        acc += tl.load(to, mask=written, other=0.0).to(tl.float32)
    tl.store(to, acc.to(out.dtype.element_ty), mask=written)


def few_row_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """See `reference.gemm.few_row_gemm`; only for what `few_row_shapes.takes` says."""
    out = residual
    if out is None:
        size = x.shape[0], weight.shape[0]
        out = torch.empty(size, dtype=out_dtype or x.dtype, device=x.device)
    tuning = few_row_tuning(x.shape[0], weight.shape[0])
    run_few_rows(x, weight, bias, out, tuning, adds=residual is not None)
    return out


def run_few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tuning: FewRowTuning,
    *,
    adds: bool = False,
) -> None:
    """Computes one GEMM into `out` [T, N], or adds it to what is there."""
    num_rows, num_outputs = out.shape
    in_registers = num_rows <= REGISTER_ROWS
    overlap = uses_pdl(x.device, num_rows)
    few_row_gemm_kernel[(triton.cdiv(num_outputs, tuning.cols),)](
        x,
        weight,
        bias,
        out,
        num_rows,
        num_outputs,
        weight.shape[1],
        x.stride(0),
        out.stride(0),
        ROWS=triton.next_power_of_2(num_rows if in_registers else max(8, num_rows)),
        COLS=tuning.cols,
        DEPTH=tuning.depth,
        VECTOR=VECTOR,
        IN_REGISTERS=in_registers,
        HAS_BIAS=bias is not None,
        ADDS=adds,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        OVERLAP=overlap,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **({"launch_pdl": True} if overlap else {}),
    )
