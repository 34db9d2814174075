"""Rows of FP8, up to four of them, by weights of FP8, in registers: each 128 x 128 weights share a
scale, and each 128 numbers of a row.

A program has a few outputs and all of the inner dimension, as in `few_row_gemm`: a thread
multiplies 16 weights where it has loaded them, and multiplies their sum by both scales. Its first
weights are asked for before the kernel in front has ended (PDL), since they depend on nothing.
Matrix units would multiply sixteen rows at least, and wait for weights that go through shared
memory.

Outputs may be in groups that read a part of the row each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import supports_pdl
from tandem_kernels.tunings.table import plain_table

_VECTOR = tl.constexpr(16)
"""Weights that one instruction loads."""


@dataclass(frozen=True, slots=True)
class FewFp8Tuning:
    """Says how one shape runs.

    Attributes:
        cols, depth: Outputs of a program, and how much of the inner dimension it takes at once.
    """

    cols: int
    depth: int
    num_warps: int


_TABLE = plain_table("fp8_registers", FewFp8Tuning, ("num_rows", "num_outputs", "inner"))


def few_fp8_tuning(
    device: torch.device, num_rows: int, num_outputs: int, inner: int
) -> FewFp8Tuning:
    """Chooses for x [num_rows, inner] -> [num_rows, num_outputs], multiples of 128."""
    return _TABLE.choose(device, num_rows, num_outputs, inner)


@triton.jit
def _part(
    places: tl.tensor, at: tl.tensor, START: tl.constexpr, INNER: tl.constexpr, ALL: tl.constexpr
) -> tl.tensor:
    """Loads what belongs to inputs START + `at`, of which there are INNER. ALL: are there."""
    return tl.load(places, mask=None if ALL else START + at < INNER, other=None if ALL else 0.0)


@triton.jit(do_not_specialize=["num_rows", "x_scales_stride"])
def fp8_few_row_kernel(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    w_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    group_outputs: tl.tensor,
    x_stride: tl.tensor,
    x_scales_stride: tl.tensor,
    w_scales_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    INNER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes, in program j, outputs j * COLS and on of all rows."""
    STEPS: tl.constexpr = (INNER + DEPTH - 1) // DEPTH
    LANES: tl.constexpr = DEPTH // _VECTOR
    BLOCKS: tl.constexpr = DEPTH // 128
    ALL: tl.constexpr = INNER % DEPTH == 0
    if OVERLAP:
        gdc_launch_dependents()
    first = tl.program_id(0) * COLS
    col = first + tl.arange(0, COLS)
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)[None, :]
    block = (tl.arange(0, LANES) // (128 // _VECTOR))[None, :]
    places = weight + col.to(tl.int64)[:, None] * INNER + depth
    of_weight = w_scales + first // 128 * w_scales_stride + block
    ahead = _part(places, depth, 0, INNER, ALL)
    ahead_scale = _part(of_weight, block * 128, 0, INNER, ALL)
    group = first // group_outputs
    own = tl.minimum(row, num_rows - 1)[:, None]
    inputs = x + own.to(tl.int64) * x_stride + group * INNER + depth
    of_input = x_scales + (group * (INNER // 128) + block) * x_scales_stride + own
    sums = tl.zeros([COLS, ROWS, LANES], tl.float32)
    if OVERLAP:
        gdc_wait()
    for step in tl.static_range(STEPS):
        by, scale = ahead, ahead_scale
        given = _part(inputs + step * DEPTH, depth, step * DEPTH, INNER, ALL)
        scales = of_input + step * BLOCKS * x_scales_stride
        scale *= _part(scales, block * 128, step * DEPTH, INNER, ALL)
        if step + 1 < STEPS:
            ahead = _part(places + (step + 1) * DEPTH, depth, (step + 1) * DEPTH, INNER, ALL)
            scales = of_weight + (step + 1) * BLOCKS
            ahead_scale = _part(scales, block * 128, (step + 1) * DEPTH, INNER, ALL)
        wide = by.to(tl.float32).reshape(COLS, 1, LANES, _VECTOR)
        wide *= given.to(tl.float32).reshape(1, ROWS, LANES, _VECTOR)
        sums += tl.sum(wide, axis=3) * scale[None, :, :]
    acc = tl.sum(sums, axis=2)
    if HAS_BIAS:
        acc += tl.load(bias + col).to(tl.float32)[:, None]
    to = out + row.to(tl.int64)[None, :] * num_outputs + col[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(row < num_rows)[None, :])


def fp8_few_rows(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tuning: FewFp8Tuning,
    groups: int = 1,
) -> Tensor:
    """Computes [T, K] x [N, K] into `out` [T, N], as `fp8_gemm.fp8_small_m` does on scales of
    blocks."""
    num_rows, num_outputs = out.shape
    if num_rows == 0:
        return out
    overlap = supports_pdl(x.device)
    fp8_few_row_kernel[(num_outputs // tuning.cols,)](
        x,
        x_scales,
        weight,
        w_scales,
        bias,
        out,
        num_rows,
        num_outputs,
        num_outputs // groups,
        x.stride(0),
        x_scales.stride(0),
        w_scales.stride(0),
        ROWS=triton.next_power_of_2(num_rows),
        COLS=tuning.cols,
        DEPTH=tuning.depth,
        INNER=weight.shape[1],
        HAS_BIAS=bias is not None,
        OVERLAP=overlap,
        num_warps=tuning.num_warps,
        **({"launch_pdl": True} if overlap else {}),
    )
    return out
