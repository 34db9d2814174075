"""Linear layers of few rows with their adapters, in one launch: the layer, A and B.

    programs 0 .. S     x by A of all slots that rows have, in pieces of the inner dimension
    programs S ..       x by the layer's weight, as `small_m_gemm` does, a tile in one program or
                        in several, by the inner dimension; then, when the first programs have
                        signalled that they are done, what these left by B of each row's slot

The first programs have a tenth of the others' work, so these seldom wait, and look for it while
their last weights are on their way. Early on they prefetch B, for which nothing waits. The parts of
a tile are summed by the program that comes last, in their order: the same bits every time.

Programs are numbered as they begin, by ticket. So those that others wait for run, and themselves
wait for the kernel in front alone, in whatever order the GPU begins programs.

    counters    tickets
                how many of the first programs are done
                how many of the others have seen it; the last one sets both to zero
                of each tile, how many parts are there
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import supports_pdl
from tandem_kernels.lora.lora_gemm_parts import (
    DONE,
    PASSED,
    await_shrinks,
    prefetch_factors,
    shrink,
    sum_of_splits,
    take_ticket,
    write,
)
from tandem_kernels.lora.lora_gemm_tuning import LoraGemmTuning, lora_gemm_tuning
from tandem_kernels.lora.lora_lanes import factors_of, slots_at_once, with_slots
from tandem_kernels.product_precision import precision_of

_MOST_PIECES = 8


@triton.jit
def _multiply(
    number: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    b: tl.tensor,
    token_slots: tl.tensor,
    sums: tl.tensor,
    parts: tl.tensor,
    counters: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    b_stride: tl.tensor,
    split_steps: tl.tensor,
    first_end: tl.tensor,
    second_end: tl.tensor,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    SLOTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SHRINKS: tl.constexpr,
    PIECES: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes a part of a tile; the first part adds what adapters make of it, and it alone looks
    for what the SHRINKS programs left."""
    tile, split = number // SPLITS, number % SPLITS
    begin = tile * COLS
    col, row = begin + tl.arange(0, COLS), tl.arange(0, ROWS)
    up = num_outputs + col
    both = 2 * num_outputs if GATED else num_outputs
    real = (row < num_rows)[:, None]
    inputs = x + row[:, None] * x_stride + tl.arange(0, DEPTH)[None, :]
    places = weight + col.to(tl.int64)[:, None] * inner + tl.arange(0, DEPTH)[None, :]
    part = (begin >= first_end).to(tl.int32) + (begin >= second_end).to(tl.int32)
    first = split * split_steps
    last = tl.minimum(first + split_steps, inner // DEPTH)
    look = tl.where(split == 0, tl.maximum(last - AHEAD, 0), -1)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    second = tl.zeros([ROWS, COLS], tl.float32)
    slots, passed = tl.full([ROWS], -1, tl.int32), -1
    sum_of = tl.zeros([ROWS, RANK], tl.float32)
    sum_up = sum_of
    by = tl.zeros([COLS, AT_ONCE * RANK], b.dtype.element_ty)
    by_up = by
    if OVERLAP:
        gdc_wait()
    for step in range(first, last):
        if OVERLAP and step == 0:
            present = tl.load(token_slots + row, mask=row < num_rows, other=-1)
            prefetch_factors(b, present, begin, b_stride, SLOTS, RANK, COLS)
            if GATED:
                prefetch_factors(b, present, num_outputs + begin, b_stride, SLOTS, RANK, COLS)
        if step == look:
            slots = tl.load(token_slots + row, mask=row < num_rows, other=-1)
            left = sums + ((row * SLOTS + slots) * WIDTH + part * RANK)[:, None]
            passed, sum_of, sum_up = await_shrinks(
                counters, SHRINKS, left, slots, num_rows * SLOTS * WIDTH, RANK, PIECES, GATED
            )
            by = factors_of(b, slots, 0, col, both, b_stride, AT_ONCE, RANK)
            if GATED:
                by_up = factors_of(b, slots, 0, up, both, b_stride, AT_ONCE, RANK)
        given = tl.load(inputs + step * DEPTH, mask=real, other=0.0)
        weights = tl.load(places + step * DEPTH)
        acc = tl.dot(given, tl.trans(weights), acc, input_precision=PRECISION)
        if GATED:
            ups = tl.load(places + num_outputs.to(tl.int64) * inner + step * DEPTH)
            second = tl.dot(given, tl.trans(ups), second, input_precision=PRECISION)
    if split == 0:
        if GATED:
            second = with_slots(
                second, sum_up, by_up, slots, b, up, both, b_stride, SLOTS, AT_ONCE, RANK, PRECISION
            )
        else:
            # B is put in order behind this, where the loop's tiles have left shared memory: of
            # programs without its 8 KB three fit an SM.
            by = tl.where(passed >= 0, by, 0.0)
        acc = with_slots(
            acc, sum_of, by, slots, b, col, both, b_stride, SLOTS, AT_ONCE, RANK, PRECISION
        )
    at = row[:, None] * num_outputs + col[None, :]
    if SPLITS > 1:
        acc, real = sum_of_splits(
            acc, parts + at, real, num_rows * num_outputs, split, counters, tile, SPLITS
        )
    write(acc, second, bias, col, out + at, real, GATED, GELU, HAS_BIAS)
    if passed == num_outputs // COLS - 1:
        tl.store(counters + DONE, 0)
        tl.store(counters + PASSED, 0)


@triton.jit(do_not_specialize=["num_rows"])
def lora_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    token_slots: tl.tensor,
    sums: tl.tensor,
    parts: tl.tensor,
    counters: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    shrink_steps: tl.tensor,
    split_steps: tl.tensor,
    first_end: tl.tensor,
    second_end: tl.tensor,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SLOTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PIECES: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Multiplies by A in the first programs, and computes COLS outputs in each SPLITS of
    the others. When GATED, they are the gate's, and the other half lies `num_outputs` behind."""
    width: tl.constexpr = PARTS * RANK
    shrinks: tl.constexpr = (SLOTS * width + COLS - 1) // COLS * PIECES
    ticket = take_ticket(counters)
    if OVERLAP:
        gdc_launch_dependents()
    if ticket < shrinks:
        shrink(
            ticket,
            x,
            a,
            token_slots,
            sums,
            counters,
            num_rows,
            inner,
            x_stride,
            a_stride,
            shrink_steps,
            width,
            SLOTS * width,
            ROWS,
            COLS,
            DEPTH,
            PRECISION,
            OVERLAP,
        )
    else:
        _multiply(
            ticket - shrinks,
            x,
            weight,
            bias,
            b,
            token_slots,
            sums,
            parts,
            counters,
            out,
            num_rows,
            num_outputs,
            inner,
            x_stride,
            b_stride,
            split_steps,
            first_end,
            second_end,
            width,
            RANK,
            SLOTS,
            AT_ONCE,
            shrinks,
            PIECES,
            SPLITS,
            ROWS,
            COLS,
            DEPTH,
            AHEAD,
            GATED,
            GELU,
            HAS_BIAS,
            PRECISION,
            OVERLAP,
        )


def lora_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    token_slots: Tensor,
    ends: tuple[int, ...],
    counters: Tensor,
) -> Tensor:
    """See `reference.lora.lora_gemm`; only for what `lora_gemm_shapes.takes` says."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    tuning = lora_gemm_tuning(x.device, len(x), len(weight), a.shape[0] * a.shape[1], gated=False)
    run_lora_gemm(x, weight, bias, a, b, token_slots, ends, counters, out, tuning)
    return out


def lora_gate_up(
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    token_slots: Tensor,
    counters: Tensor,
    *,
    is_gelu: bool,
) -> Tensor:
    """See `reference.lora.lora_gate_up`; only for what `lora_gemm_shapes.takes` says."""
    half = weight.shape[0] // 2
    out = torch.empty((x.shape[0], half), dtype=x.dtype, device=x.device)
    tuning = lora_gemm_tuning(x.device, len(x), half, a.shape[0] * a.shape[1], gated=True)
    ends = half, 2 * half
    run_lora_gemm(
        x, weight, None, a, b, token_slots, ends, counters, out, tuning, gated=True, gelu=is_gelu
    )
    return out


def run_lora_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    token_slots: Tensor,
    ends: tuple[int, ...],
    counters: Tensor,
    out: Tensor,
    tuning: LoraGemmTuning,
    *,
    gated: bool = False,
    gelu: bool = False,
) -> None:
    """Computes one GEMM into `out` [T, N], or [T, N / 2] when `gated`."""
    num_rows, num_outputs = out.shape
    num_slots, width, inner = a.shape
    rank = width // len(ends)
    cuts = _cuts(tuning, inner, num_slots * width, gated)
    sums = x.new_empty((cuts.pieces, num_rows, num_slots * width), dtype=torch.float32)
    parts = x.new_empty((cuts.splits, *out.shape), dtype=torch.float32) if cuts.splits > 1 else sums
    overlap = supports_pdl(x.device)
    programs = cuts.shrink_tiles * cuts.pieces + num_outputs // tuning.cols * cuts.splits
    lora_gemm_kernel[(programs,)](
        x,
        weight,
        bias,
        a,
        b,
        token_slots,
        sums,
        parts,
        counters,
        out,
        num_rows,
        num_outputs,
        inner,
        x.stride(0),
        a.stride(0),
        b.stride(0),
        cuts.shrink_steps,
        cuts.split_steps,
        ends[0],
        ends[min(1, len(ends) - 1)],
        PARTS=len(ends),
        RANK=rank,
        SLOTS=num_slots,
        AT_ONCE=slots_at_once(num_slots, rank),
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        COLS=tuning.cols,
        **cuts.constants,
        GATED=gated,
        GELU=gelu,
        HAS_BIAS=bias is not None,
        PRECISION=precision_of(x),
        OVERLAP=overlap,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **({"launch_pdl": True} if overlap else {}),
    )


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Says how the inner dimension is cut: in steps of `depth`, of which a program for A takes
    `shrink_steps` and there are `pieces`, and the others `split_steps` and `splits`."""

    depth: int
    shrink_tiles: int
    shrink_steps: int
    pieces: int
    split_steps: int
    splits: int
    ahead: int

    @property
    def constants(self) -> dict[str, int]:
        return {
            "PIECES": self.pieces,
            "SPLITS": self.splits,
            "DEPTH": self.depth,
            "AHEAD": max(1, min(self.ahead, self.split_steps)),
        }


def _cuts(tuning: LoraGemmTuning, inner: int, columns: int, gated: bool) -> _Cuts:
    depth = math.gcd(tuning.depth, inner)
    tiles = triton.cdiv(columns, tuning.cols)
    most = max(1, min(_MOST_PIECES, tuning.shrink_programs // tiles))
    pieces = _cut(inner // depth, most)
    splits = _cut(inner // depth, 1 if gated else tuning.splits)
    return _Cuts(depth, tiles, *pieces, *splits, tuning.ahead)


def _cut(steps: int, most: int) -> tuple[int, int]:
    """Cuts steps among at most this many, of whom none is without: (steps of each, how many)."""
    each = triton.cdiv(steps, most)
    return each, triton.cdiv(steps, each)
