"""Parts of a head that was cut, joined by the program that ends last.

A launch behind the attention (`decode_merge`) costs its start, its way to the parts, and the wait
for the slowest program. Here the last program of a head to end has all of that behind it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.attention.attention_sink import sink_of, with_sink

_MOST_NUMBERS = 4096
"""Parts that are read at once have no more: a thread keeps them in registers."""


def parts_at_once(group: int, width: int) -> int:
    """Returns how many parts, [group, width] each, are on their way at once."""
    return max(1, min(4, _MOST_NUMBERS // (group * width)))


@triton.jit
def leave_part(
    partial_acc: tl.tensor,
    partial_state: tl.tensor,
    slot: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
) -> None:
    """Stores the softmax state of a part, of which the first GROUP rows are real."""
    row, dim = tl.arange(0, ROWS), tl.arange(0, BLOCK_VALUE)
    real = row < GROUP
    to = partial_acc + (slot * GROUP + row[:, None]) * VALUE_DIM + dim[None, :]
    tl.store(to, acc, mask=real[:, None] & (dim < VALUE_DIM)[None, :])
    state = partial_state + slot * (2 * GROUP) + row
    tl.store(state, peak, mask=real)
    tl.store(state + GROUP, total, mask=real)


@triton.jit
def join_parts(
    out: tl.tensor,
    partial_acc: tl.tensor,
    partial_state: tl.tensor,
    sinks: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    query_head: tl.tensor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Writes the heads `query_head` and on, GROUP of them, to `out`, those of a request [Hq, Dv],
    from parts in slots of the programs `first` to `last`. Reads past the first cache: other
    programs wrote them. HEADS: a power of two."""
    g = tl.arange(0, HEADS)
    dim = tl.arange(0, BLOCK_VALUE)
    real = g < GROUP
    peak = tl.full([HEADS], -3.0e38, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, BLOCK_VALUE], tl.float32)
    place = g[:, None] * VALUE_DIM + dim[None, :]
    inside = real[:, None] & (dim < VALUE_DIM)[None, :]
    for begin in range(first, last + 1, PARTS):
        for step in tl.static_range(PARTS):
            part = begin + step
            slot = part * 2 + (part == first).to(tl.int32)
            known = real & (part <= last)
            state = partial_state + slot * (2 * GROUP) + g
            part_peak = tl.load(state, mask=known, other=-3.0e38, cache_modifier=".cg")
            part_total = tl.load(state + GROUP, mask=known, other=0.0, cache_modifier=".cg")
            numbers = partial_acc + slot * (GROUP * VALUE_DIM) + place
            known_numbers = inside & (part <= last)
            numbers = tl.load(numbers, mask=known_numbers, other=0.0, cache_modifier=".cg")
            higher = tl.maximum(peak, part_peak)
            shrink = tl.exp2(peak - higher)
            part_shrink = tl.exp2(part_peak - higher)
            total = total * shrink + part_total * part_shrink
            acc = acc * shrink[:, None] + numbers * part_shrink[:, None]
            peak = higher
    if HAS_SINKS:
        total = with_sink(total, peak, sink_of(sinks, query_head + g, real))
    to = out + query_head * VALUE_DIM + place
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def join_behind_others(
    out: tl.tensor,
    partial_acc: tl.tensor,
    partial_state: tl.tensor,
    tickets: tl.tensor,
    sinks: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    query_head: tl.tensor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Joins the parts of programs `first` to `last`, as `join_parts` does, where all others have
    left theirs; then the ticket is zero again."""
    tl.debug_barrier()
    ticket = tickets + first
    if tl.atomic_add(ticket, 1, sem="acq_rel") == last - first:
        tl.store(ticket, 0)
        join_parts(
            out, partial_acc, partial_state, sinks, first, last, query_head,
            GROUP, HEADS, VALUE_DIM, BLOCK_VALUE, HAS_SINKS, PARTS,
        )  # fmt: skip


@triton.jit
def zero_without_context(
    out: tl.tensor,
    seq_len: tl.tensor,
    num_reqs: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    seq_lens: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    REQS: tl.constexpr,
) -> None:
    """Writes zeros for requests program, program + programs and so on that have no context; a
    request has WIDTH numbers of `out`."""
    request = tl.arange(0, REQS)
    own = (request % programs == program) & (request < num_reqs)
    if tl.sum((own & (seq_len == 0)).to(tl.int32), axis=0) > 0:
        for r in range(program, num_reqs, programs):
            if tl.load(seq_lens + r) == 0:
                for begin in range(0, WIDTH, BLOCK):
                    at = begin + tl.arange(0, BLOCK)
                    none = tl.zeros([BLOCK], out.dtype.element_ty)
                    tl.store(out + r * WIDTH + at, none, mask=at < WIDTH)
