"""Linear layers for few rows whatever their sizes: bias and residual stream included.

    rows up to 4    a program multiplies a few outputs' weights where they are loaded, in registers
    up to 8         matrix units, from registers (`few_row_warps`), where they take rows and weights
    more            matrix units, weights as the first operand

A program goes through the whole inner dimension, so that nothing sums parts: that its outputs are
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
from tandem_kernels.gemm.few_row_warp_shapes import few_row_warp_tuning, takes_warps
from tandem_kernels.gemm.few_row_warps import run_few_rows_by_warps
from tandem_kernels.gemm.gemm_thresholds import gemm_thresholds
from tandem_kernels.product_precision import precision_of
from tandem_kernels.tunings.table import plain_table


@dataclass(frozen=True, slots=True)
class FewRowTuning:
    """Says how one GEMM runs.

    Attributes:
        cols, depth: Outputs of a program, and how much of the inner dimension it takes at once.
        num_stages: Loads ahead, on matrix units.
        max_registers: Of a thread, so that all programs of a launch fit on the SMs at once; None:
            as many as the compiler likes.
    """

    cols: int
    depth: int
    num_warps: int
    num_stages: int = 1
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Returns the compiler's options."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}


_TABLE = plain_table("few_rows", FewRowTuning, ("num_rows", "num_outputs", "inner"))


def few_row_tuning(
    device: torch.device, num_rows: int, num_outputs: int, inner: int = 0
) -> FewRowTuning:
    """Chooses for x [num_rows, inner] -> [num_rows, num_outputs].
    `bench.engine.gemms --formats few-rows --tune` times others.

    Args:
        inner: 0: of `few_row_qkv`, for which it makes no difference.
    """
    return _TABLE.choose(device, num_rows, num_outputs, inner)


@triton.jit
def word_places(x: tl.tensor, row: tl.tensor, stride: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """Returns addresses [rows, lanes] of words, two numbers of half precision each. `stride` is in
    numbers, `lane` in words."""
    words = x.to(tl.pointer_type(tl.int32))
    return words + row.to(tl.int64)[:, None] * (stride // 2) + lane[None, :]


@triton.jit
def _numbers(words: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Returns the even and the odd numbers in float32. Of bfloat16, each takes one instruction."""
    if KIND == tl.bfloat16:  # noqa: SIM300
        even = (words << 16).to(tl.float32, bitcast=True)
        odd = (words & -65536).to(tl.float32, bitcast=True)
    else:
        even = words.to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
        odd = (words >> 16).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
    return even, odd


@triton.jit
def load_words(
    places: tl.tensor,
    lane: tl.tensor,
    START: tl.constexpr,
    WORDS: tl.constexpr,
    INNER: tl.constexpr,
) -> tl.tensor:
    """Loads WORDS words from START on, of which those behind a row's end are zeros."""
    if (START + WORDS) * 2 <= INNER:
        words = tl.load(places + START)
    else:
        words = tl.load(places + START, mask=(START + lane < INNER // 2)[None, :], other=0)
    return words


@triton.jit
def products_in_registers(
    ahead: tl.tensor,
    places: tl.tensor,
    inputs: tl.tensor,
    scales: tl.tensor,
    lane: tl.tensor,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    INNER: tl.constexpr,
    KIND: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> tl.tensor:
    """Returns products [COLS, ROWS] of weights and rows, and the sums of the rows' squares [ROWS].

    `places` and `inputs` are `word_places` of both, of which WORDS are taken at once; `lane` counts
    these. HAS_NORM: rows are multiplied by the norm's weight at `scales` as they are loaded; else
    there are no squares. The caller has asked for the first weights, `ahead`, since they depend on
    nothing; with OVERLAP, rows are loaded when the kernels in front have ended.
    """
    VECTOR: tl.constexpr = 4
    LANES: tl.constexpr = WORDS // VECTOR
    STEPS: tl.constexpr = (INNER + 2 * WORDS - 1) // (2 * WORDS)
    sums = tl.zeros([COLS, ROWS, LANES], tl.float32)
    squares = tl.zeros([ROWS, LANES], tl.float32)
    if HAS_NORM:
        scale_ahead = load_words(scales, lane, 0, WORDS, INNER)
    if OVERLAP:
        gdc_wait()
    for step in tl.static_range(STEPS):
        by = ahead
        given = load_words(inputs, lane, step * WORDS, WORDS, INNER)
        if step + 1 < STEPS:
            ahead = load_words(places, lane, (step + 1) * WORDS, WORDS, INNER)
        even_by, odd_by = _numbers(by.reshape(COLS, 1, LANES, VECTOR), KIND)
        even, odd = _numbers(given.reshape(ROWS, LANES, VECTOR), KIND)
        if HAS_NORM:
            squares += tl.sum(even * even + odd * odd, axis=2)
            even_scale, odd_scale = _numbers(scale_ahead.reshape(1, LANES, VECTOR), KIND)
            even *= even_scale
            odd *= odd_scale
            if step + 1 < STEPS:
                scale_ahead = load_words(scales, lane, (step + 1) * WORDS, WORDS, INNER)
        sums += tl.sum(even_by * even[None, :, :, :], axis=3)
        sums += tl.sum(odd_by * odd[None, :, :, :], axis=3)
    return tl.sum(sums, axis=2), tl.sum(squares, axis=1)


@triton.jit(do_not_specialize=["num_rows"])
def few_row_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    INNER: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes, in program j, outputs j * COLS and on of all rows. ADDS: to what `out` has."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    row = tl.arange(0, ROWS)
    real_col = (col < num_outputs)[:, None]
    real_row = (row < num_rows)[:, None]
    to = out + row.to(tl.int64)[None, :] * out_stride + col[:, None]
    written = real_col & (row < num_rows)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
    if IN_REGISTERS:
        lane = tl.arange(0, DEPTH // 2)
        places = word_places(weight, tl.minimum(col, num_outputs - 1), INNER, lane)
        inputs = word_places(x, tl.minimum(row, num_rows - 1), x_stride, lane)
        ahead = load_words(places, lane, 0, DEPTH // 2, INNER)
    added = 0.0
    if HAS_BIAS:
        added = tl.load(bias + col, mask=col < num_outputs, other=0.0).to(tl.float32)[:, None]
    if OVERLAP:
        gdc_wait()
    carried = 0.0
    if ADDS:
        carried = tl.load(to, mask=written, other=0.0).to(tl.float32)
    if IN_REGISTERS:
        acc, _ = products_in_registers(
            ahead, places, inputs, None, lane, COLS, ROWS, DEPTH // 2, INNER,
            weight.dtype.element_ty, False, False,
        )  # fmt: skip
    else:
        lane = tl.arange(0, DEPTH)
        places = weight + col.to(tl.int64)[:, None] * INNER + lane[None, :]
        inputs = x + row.to(tl.int64)[:, None] * x_stride + lane[None, :]
        acc = tl.zeros([COLS, ROWS], tl.float32)
        for start in range(0, INNER, DEPTH):
            inside = (start + lane < INNER)[None, :]
            given = tl.load(inputs + start, mask=real_row & inside, other=0.0)
            by = tl.load(places + start, mask=real_col & inside, other=0.0)
            acc = tl.dot(by, given.T, acc, input_precision=PRECISION)
    acc = acc + added + carried
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
    if takes_warps(x, weight):
        of_warps = few_row_warp_tuning(x.device, *weight.shape)
        run_few_rows_by_warps(x, weight, bias, out, of_warps, adds=residual is not None)
        return out
    tuning = few_row_tuning(x.device, x.shape[0], *weight.shape)
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
    in_registers = num_rows <= gemm_thresholds(x.device).register_rows
    overlap = uses_pdl(x.device, num_rows)
    few_row_gemm_kernel[(triton.cdiv(num_outputs, tuning.cols),)](
        x,
        weight,
        bias,
        out,
        num_rows,
        num_outputs,
        x.stride(0),
        out.stride(0),
        ROWS=triton.next_power_of_2(num_rows if in_registers else max(8, num_rows)),
        COLS=tuning.cols,
        DEPTH=tuning.depth,
        INNER=weight.shape[1],
        IN_REGISTERS=in_registers,
        HAS_BIAS=bias is not None,
        ADDS=adds,
        PRECISION=precision_of(x),
        OVERLAP=overlap,
        **tuning.options,
        **({"launch_pdl": True} if overlap else {}),
    )
