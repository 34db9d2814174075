"""The second kernel of `decode_attention` for few requests, and of `latent_decode`: parts of a head
that was cut become its output.

There are fewer cuts than runs, so a program is for the head whose first part ends a run, and most
have nothing to do. Where there are fewer heads than runs, a program is for some columns of a head:
a head of one request may have over a hundred parts, which one program reads for too long.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.attention.attention_sink import sink_of, with_sink
from tandem_kernels.attention.decode_line import aligned_run, find, line, skipped
from tandem_kernels.late_wait import wait_behind

FEW_UNITS = 16
"""Heads of requests that have many parts each: then a program is for some columns of one."""
_COLUMNS, _PARTS = 64, 64
"""Such a program has this many columns, and reads this many parts at once."""


def merge_shape(num_units: int, width: int) -> dict[str, int]:
    """Returns the columns of a program, and the parts that it reads at once.

    Args:
        num_units: Heads of requests.
        width: Columns of all programs of a head, a power of two.
    """
    if num_units <= FEW_UNITS:
        return {"BLOCK_VALUE": min(width, _COLUMNS), "PARTS": _PARTS}
    return {"BLOCK_VALUE": width, "PARTS": 16}


@triton.jit(do_not_specialize=["num_reqs", "num_runs"])
def merge_kernel(
    seq_lens: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    partial_acc: tl.tensor,
    partial_state: tl.tensor,
    num_reqs: tl.tensor,
    num_runs: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    TILE: tl.constexpr,
    REQS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
    BY_HEAD: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Merges, in program (i, g, c), columns c * BLOCK_VALUE and on of query head g of a KV head, if
    that is cut. BY_HEAD: of head i, as heads are counted through all requests; else of the one
    whose first part is the end of run i. Of a request's heads, GROUP each, the first ROWS are real.

    Outputs of requests without a context become zero: of head i, or of requests i, i + programs,
    and so on.
    """
    g = tl.program_id(1)
    dim = tl.program_id(2) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    kind = out.dtype.element_ty
    seq_len, ends, length = line(seq_lens, num_reqs, NUM_KV_HEADS, TILE, REQS, WINDOW)
    run = tl.cdiv(length, num_runs)
    if ALIGNED:
        run = aligned_run(seq_len, run, TILE)
    request = tl.arange(0, REQS)
    if BY_HEAD:
        r = tl.program_id(0) // NUM_KV_HEADS
        head = tl.program_id(0) % NUM_KV_HEADS
        own_len = tl.sum(tl.where(request == r, seq_len, 0), axis=0)
        tiles = tl.cdiv(own_len, TILE) - skipped(own_len, TILE, WINDOW)
        begin = tl.sum(tl.where(request == r, ends, 0), axis=0) - (NUM_KV_HEADS - head) * tiles
        run = tl.maximum(run, 1)
        program = begin // run
        last = (begin + tiles - 1) // run
    else:
        program = tl.program_id(0)

    if OVERLAP:
        # Before any store, since kernels in front may still read this memory; and even where
        # nothing is to be merged, since the next kernel may wait for this one only.
        if BY_HEAD:
            wait_behind(program + last + own_len)
            gdc_launch_dependents()
        else:
            gdc_wait()
    if BY_HEAD:
        if own_len == 0:
            if head * GROUP + g < ROWS:
                to = (r * ROWS + head * GROUP + g) * VALUE_DIM + dim
                tl.store(out + to, tl.zeros([BLOCK_VALUE], kind), mask=dim < VALUE_DIM)
            return
    else:
        own = (request % num_runs == program) & (request < num_reqs)
        if tl.sum((own & (seq_len == 0)).to(tl.int32), axis=0) > 0:
            for r in range(program, num_reqs, num_runs):
                if tl.load(seq_lens + r) == 0:
                    for head in range(NUM_KV_HEADS):
                        to = (r * ROWS + head * GROUP + g) * VALUE_DIM + dim
                        real = (dim < VALUE_DIM) & (head * GROUP + g < ROWS)
                        tl.store(out + to, tl.zeros([BLOCK_VALUE], kind), mask=real)
        end = (program + 1) * run
        if end >= length:
            return
        r, begin = find(ends, end - 1)
        own_len = tl.sum(tl.where(request == r, seq_len, 0), axis=0)
        tiles = tl.cdiv(own_len, TILE) - skipped(own_len, TILE, WINDOW)
        head = (end - 1 - begin) // tiles
        begin += head * tiles
        if begin < end - run:
            return
        last = (begin + tiles - 1) // run
    if (last == program) | (head * GROUP + g >= ROWS):
        return
    query_head = head * GROUP + g
    if HAS_SINKS:
        sink = sink_of(sinks, query_head, g < GROUP)
    peak = -3.0e38
    total = 0.0
    acc = tl.zeros([BLOCK_VALUE], tl.float32)
    for first in range(program, last + 1, PARTS):
        part = first + tl.arange(0, PARTS)
        known = part <= last
        slot = part * 2 + (part == program).to(tl.int32)
        state = partial_state + slot * (2 * GROUP) + g
        part_peak = tl.load(state, mask=known, other=-3.0e38)
        part_total = tl.load(state + GROUP, mask=known, other=0.0)
        place = (slot * GROUP + g)[:, None] * VALUE_DIM + dim[None, :]
        real = known[:, None] & (dim < VALUE_DIM)[None, :]
        parts = tl.load(partial_acc + place, mask=real, other=0.0)
        higher = tl.maximum(peak, tl.max(part_peak, axis=0))
        shrink = tl.exp2(peak - higher)
        part_shrink = tl.exp2(part_peak - higher)
        total = total * shrink + tl.sum(part_total * part_shrink, axis=0)
        acc = acc * shrink + tl.sum(parts * part_shrink[:, None], axis=0)
        peak = higher
    if HAS_SINKS:
        total = with_sink(total, peak, sink)
    to = (r * ROWS + query_head) * VALUE_DIM + dim
    tl.store(out + to, (acc / total).to(kind), mask=dim < VALUE_DIM)
