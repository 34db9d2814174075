"""Gate and up of MXFP4 experts of a few rows, a warp at a time, as `one_row` computes those of one.

A program is a warp and has one or two strips of 16 outputs of one expert, of gate and of up. It
goes through the whole inner dimension, and loads a tile's words in the order in which it
multiplies, some tiles ahead. So warps wait for nothing but memory, and while some begin or end,
others of the same SM read. All of a step's are in place at once where experts have a row or two.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.elementwise.gate_form import GateForm, gate_arguments, gate_code
from tandem_kernels.experts.ahead_gate import activated_by_alpha
from tandem_kernels.experts.fp4.few_rows.choice import expert_in_place, pair_of_row
from tandem_kernels.experts.fp4.few_rows.products import EIGHT, TILE_PRODUCTS, TILE_REGISTERS
from tandem_kernels.experts.fp4.few_rows.shapes import ExpertWarpTuning
from tandem_kernels.experts.fp4.one_row.threads import threads_of
from tandem_kernels.small_launches import in_turn


@gluon.jit
def _strip_words(words: gl.tensor, powers: gl.tensor, real: gl.tensor, size: gl.tensor) -> gl.tuple:
    """Loads a thread's words of a tile, of gate and of up, which is `size` words further: two
    halves of both sides each, and powers."""
    more = (words + size).to(gl.pointer_type(gl.int64), bitcast=True)
    words = words.to(gl.pointer_type(gl.int64), bitcast=True)
    return (
        gl.load(words, mask=real, other=0), gl.load(words + 128, mask=real, other=0),
        gl.load(more, mask=real, other=0), gl.load(more + 128, mask=real, other=0),
        gl.load(powers, mask=real, other=0), gl.load(powers + size, mask=real, other=0),
    )  # fmt: skip


@gluon.jit
def _tile_words(
    tiles: gl.tensor,
    scales: gl.tensor,
    column: gl.tensor,
    size: gl.tensor,
    STRIPS: gl.constexpr,
    COLUMNS: gl.constexpr,
) -> gl.tuple:
    """Loads a thread's words of a tile, for each strip. Behind the last tile are zeros."""
    real = column < COLUMNS
    words, powers = tiles + column * 544, scales + column * 544
    found: gl.tuple = ()
    for strip in gl.static_range(STRIPS):
        found += (_strip_words(words + strip * 64, powers + strip * 8, real, size),)
    return found


@gluon.jit
def _tile_inputs(
    x: gl.tensor, column: gl.tensor, real: gl.tensor, COLUMNS: gl.constexpr
) -> gl.tuple:
    """Loads what a thread multiplies of its row for a tile, two inputs in each of eight words."""
    at = x + column * 32
    real = real & (column < COLUMNS)
    return (
        gl.load(at, mask=real, other=0), gl.load(at + 4, mask=real, other=0),
        gl.load(at + 8, mask=real, other=0), gl.load(at + 12, mask=real, other=0),
        gl.load(at + 16, mask=real, other=0), gl.load(at + 20, mask=real, other=0),
        gl.load(at + 24, mask=real, other=0), gl.load(at + 28, mask=real, other=0),
    )  # fmt: skip


@gluon.jit
def _tile_products(words: gl.tuple, inputs: gl.tuple, acc: gl.tuple) -> gl.tuple:
    """Adds a tile's products to the sums of both parts."""
    a, b, c, d, powers, powers2 = words
    x0, x1, x2, x3, x4, x5, x6, x7 = inputs
    s0, s1, s2, s3, t0, t1, t2, t3 = acc
    return gl.inline_asm_elementwise(
        TILE_PRODUCTS, TILE_REGISTERS,
        [a, b, c, d, powers, powers2, x0, x1, x2, x3, x4, x5, x6, x7,
         s0, s1, s2, s3, t0, t1, t2, t3],
        EIGHT, True, 1,
    )  # fmt: skip


@gluon.jit
def _sums_of_warps(acc: gl.tuple, OUT: gl.constexpr, WARPS: gl.constexpr) -> gl.tuple:
    """Sums what warps have of each part -> [8 rows, 16 outputs] each, in layout OUT."""
    s0, s1, s2, s3, t0, t1, t2, t3 = acc
    # Of a thread: two rows beside each other, of the outputs of both sides.
    first = gl.join(gl.join(s0, s1), gl.join(s2, s3))
    second = gl.join(gl.join(t0, t1), gl.join(t2, t3))
    total = gl.sum(gl.join(first, second).reshape(WARPS, 8, 4, 2, 2, 2), axis=0)
    # Group, quad, row, side and part.
    first, second = gl.split(total.permute(1, 2, 3, 0, 4).reshape(8, 16, 2))
    return gl.convert_layout(first, OUT), gl.convert_layout(second, OUT)


@gluon.jit(do_not_specialize=["num_pairs"])
def fp4_few_row_gate_up_kernel(
    x: gl.tensor,
    weight: gl.tensor,
    bias: gl.tensor,
    experts: gl.tensor,
    out: gl.tensor,
    num_pairs: gl.tensor,
    num_outputs: gl.tensor,
    inner: gl.tensor,
    limit: gl.tensor,
    alpha: gl.tensor,
    TOP_K: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr, STRIPS: gl.constexpr,
    COLUMNS: gl.constexpr, HAS_BIAS: gl.constexpr, GATE: gl.constexpr, OVERLAP: gl.constexpr,
) -> None:  # fmt: skip
    """Computes, in program (j, p), outputs STRIPS * 16 * j and on of the expert in place p."""
    STEPS: gl.constexpr = (COLUMNS + WARPS - 1) // WARPS
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    warp, thread = threads_of(WARPS)
    group, quad = thread // 4, thread % 4
    unit, place = gl.program_id(0), gl.program_id(1)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    expert, pairs = expert_in_place(experts, place, num_pairs, WARPS)
    if expert < 0:
        return
    size = num_outputs // 64 * (COLUMNS * 544)
    part = unit * STRIPS
    first = weight + expert.to(gl.int64) * (2 * size) + part // 4 * (COLUMNS * 544)
    part = part % 4
    tiles = first + (part * 64 + thread * 2)
    scales = first + (512 + part * 8 + group)
    column = warp[:, None] + thread * 0
    known: gl.tuple = ()
    for i in gl.static_range(AHEAD):
        at = column + i * WARPS
        known += (_tile_words(tiles, scales, at, size, STRIPS, COLUMNS),)
    of_row, exists = pair_of_row(pairs, gl.arange(0, 8, gl.SliceLayout(1, OUT)))
    col = gl.arange(0, 16, gl.SliceLayout(0, OUT)) + unit * (STRIPS * 16)
    gates = (col * 0).to(gl.float32)
    ups, gates2, ups2 = gates, gates, gates
    if HAS_BIAS:
        at_bias = bias + expert * (2 * num_outputs) + col
        gates = gl.load(at_bias).to(gl.float32)
        ups = gl.load(at_bias + num_outputs).to(gl.float32)
        if STRIPS > 1:
            gates2 = gl.load(at_bias + 16).to(gl.float32)
            ups2 = gl.load(at_bias + 16 + num_outputs).to(gl.float32)
    pair, real = pair_of_row(pairs, group)
    row = gl.where(real, pair // TOP_K, 0)
    given = (x + row * inner).to(gl.pointer_type(gl.int32), bitcast=True) + quad
    inputs = _tile_inputs(given, column, real, COLUMNS)
    zero = (thread * 0).to(gl.float32)
    acc: gl.tuple = (zero, zero, zero, zero, zero, zero, zero, zero)
    acc2: gl.tuple = acc
    for _ in range(0, STEPS, AHEAD):
        for _i in gl.static_range(AHEAD):
            own = inputs
            words = known[0]
            column += WARPS
            inputs = _tile_inputs(given, column, real, COLUMNS)
            at = column + (AHEAD - 1) * WARPS
            known = known[1:]
            known += (_tile_words(tiles, scales, at, size, STRIPS, COLUMNS),)
            acc = _tile_products(words[0], own, acc)
            if STRIPS > 1:
                acc2 = _tile_products(words[1], own, acc2)
    to = out + of_row[:, None] * num_outputs + col[None, :]
    exists = exists[:, None] & (col >= 0)[None, :]
    kind: gl.constexpr = out.dtype.element_ty
    sums, more = _sums_of_warps(acc, OUT, WARPS)
    total = activated_by_alpha(sums + gates[None, :], more + ups[None, :], limit, alpha, GATE)
    gl.store(to, total.to(kind), mask=exists)
    if STRIPS > 1:
        sums, more = _sums_of_warps(acc2, OUT, WARPS)
        total = activated_by_alpha(sums + gates2[None, :], more + ups2[None, :], limit, alpha, GATE)
        gl.store(to + 16, total.to(kind), mask=exists)


def fp4_few_row_gate_up(
    x: Tensor,
    weight: Tensor,
    experts: Tensor,
    out: Tensor,
    tuning: ExpertWarpTuning,
    bias: Tensor | None = None,
    gate: GateForm | None = None,
) -> None:
    """Computes the first GEMM; arguments are those of `fp4_expert_gemm`, and only what
    `takes_few_rows` says. `experts`: [T, k]."""
    num_pairs, num_outputs = out.shape
    grid = num_outputs // (tuning.strips * 16), min(num_pairs, len(weight))
    fp4_few_row_gate_up_kernel[grid](
        x, weight, bias, experts, out, num_pairs, num_outputs, x.stride(0), *gate_arguments(gate),
        TOP_K=experts.shape[1],
        WARPS=tuning.warps,
        AHEAD=tuning.ahead,
        STRIPS=tuning.strips,
        COLUMNS=weight.shape[3],
        HAS_BIAS=bias is not None,
        GATE=gate_code(gate),
        num_warps=tuning.warps,
        maxnreg=tuning.registers,
        **in_turn(x.device),
    )  # fmt: skip
