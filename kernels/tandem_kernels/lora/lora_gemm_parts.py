"""These are the steps of programs that compute a GEMM with adapters; see `lora_gemm`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tandem_kernels.part_sums import sum_of_parts

TICKETS = tl.constexpr(0)
DONE = tl.constexpr(1)
PASSED = tl.constexpr(2)
ARRIVED = tl.constexpr(3)
"""Say which of a layer's counters is which; those of tiles begin at the last one."""


@triton.jit
def take_ticket(counters: tl.tensor) -> tl.tensor:
    """Returns how many programs of this launch have begun before. The last one sets the counter
    back, and goes on once it is: then the kernel behind may begin, and take the same tickets."""
    ticket = tl.atomic_add(counters + TICKETS, 1, sem="relaxed")
    if ticket == tl.num_programs(0) - 1:
        ticket = tl.atomic_xchg(counters + TICKETS, 0, sem="relaxed") - 1
    return ticket


@triton.jit
def shrink(
    ticket: tl.tensor,
    x: tl.tensor,
    a: tl.tensor,
    token_slots: tl.tensor,
    sums: tl.tensor,
    counters: tl.tensor,
    num_rows: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    a_stride: tl.tensor,
    steps: tl.tensor,
    WIDTH: tl.constexpr,
    STACK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Multiplies by COLS of all slots' columns, [slots * WIDTH], over a piece of the inputs."""
    tiles: tl.constexpr = (STACK + COLS - 1) // COLS
    number = ticket // tiles
    col = ticket % tiles * COLS + tl.arange(0, COLS)
    row = tl.arange(0, ROWS)
    slots = tl.load(token_slots + row, mask=row < num_rows, other=-1)
    slot = col // WIDTH
    wanted = (slots[:, None] == slot[None, :]) & (col < STACK)[None, :]
    present = tl.max(wanted.to(tl.int32), 0) > 0
    if OVERLAP:
        gdc_wait()
    if tl.max(present.to(tl.int32), 0) > 0:
        real = (row < num_rows)[:, None]
        lane = tl.arange(0, DEPTH)[None, :]
        factors = a + slot.to(tl.int64) * a_stride + (col % WIDTH).to(tl.int64) * inner
        inputs = x + row[:, None] * x_stride + lane
        places = factors[:, None] + lane
        acc = tl.zeros([ROWS, COLS], tl.float32)
        last = tl.minimum(number * steps + steps, inner // DEPTH)
        for step in range(number * steps, last):
            given = tl.load(inputs + step * DEPTH, mask=real, other=0.0)
            by = tl.load(places + step * DEPTH, mask=present[:, None], other=0.0)
            acc = tl.dot(given, tl.trans(by), acc, input_precision=PRECISION)
        to = sums + (number * num_rows + row)[:, None] * STACK + col[None, :]
        tl.store(to, acc, mask=wanted)
    tl.debug_barrier()
    tl.atomic_add(counters + DONE, 1, sem="release")


@triton.jit
def prefetch_factors(
    b: tl.tensor,
    slots: tl.tensor,
    begin: tl.tensor,
    slot_stride: tl.tensor,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    """Asks for B of all slots that rows have, for the columns from `begin` on; nothing waits."""
    line: tl.constexpr = 64
    lines: tl.constexpr = (COLS * RANK + line - 1) // line
    slot = tl.arange(0, triton.next_power_of_2(SLOTS))
    present = tl.max((slots[:, None] == slot[None, :]).to(tl.int32), 0)
    first = b + slot.to(tl.int64) * slot_stride + begin.to(tl.int64) * RANK
    places = first[:, None] + (line * tl.arange(0, lines))[None, :]
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [places.to(tl.int64, bitcast=True), tl.broadcast_to(present[:, None], places.shape)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def await_shrinks(
    counters: tl.tensor,
    programs: tl.tensor,
    left: tl.tensor,
    slots: tl.tensor,
    apart: tl.tensor,
    RANK: tl.constexpr,
    PIECES: tl.constexpr,
    GATED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns, once the first `programs` programs are done, how many others have seen it, and what
    they left for a projection, from `left` on, and for up: [ROWS, RANK]."""
    own = (slots >= 0)[:, None]
    left += tl.arange(0, RANK)[None, :]
    while tl.atomic_add(counters + DONE, 0, sem="acquire") < programs:
        pass
    passed = tl.atomic_add(counters + PASSED, 1, sem="relaxed")
    given = sum_of_parts(left, apart, own, PIECES)
    given_up = given
    if GATED:
        given_up = sum_of_parts(left + RANK, apart, own, PIECES)
    return passed, given, given_up


@triton.jit
def sum_of_splits(
    acc: tl.tensor,
    places: tl.tensor,
    real: tl.tensor,
    apart: tl.tensor,
    split: tl.tensor,
    counters: tl.tensor,
    tile: tl.tensor,
    SPLITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Leaves a program's part of a tile, and returns the sum of all, in their order, and `real`:
    for the program that comes last; for the others nothing is."""
    arrived = counters + ARRIVED + tile
    tl.store(places + split * apart, acc, mask=real)
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        tl.store(arrived, 0)
        acc = sum_of_parts(places, apart, real, SPLITS)
    return acc, real & is_last


@triton.jit
def _activated(gate: tl.tensor, up: tl.tensor, kind: tl.constexpr, GELU: tl.constexpr) -> tl.tensor:
    """Rounds both first, as where they are read from memory."""
    gate = gate.to(kind).to(tl.float32)
    steep = gate
    if GELU:
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-steep)) * up.to(kind).to(tl.float32)


@triton.jit
def write(
    acc: tl.tensor,
    second: tl.tensor,
    bias: tl.tensor,
    col: tl.tensor,
    to: tl.tensor,
    real: tl.tensor,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Writes a tile of outputs."""
    kind = to.dtype.element_ty
    if GATED:
        acc = _activated(acc, second, kind, GELU)
    if HAS_BIAS:
        acc += tl.load(bias + col).to(tl.float32)[None, :]
    tl.store(to, acc.to(kind), mask=real)
