"""Candidates of a choice (`index_select`) on CUDA devices: a thread looks at scores side by side.

What Triton lays out for loads it lays out anew for stores to places that are computed, which takes
two thirds of the time of a walk. Here a thread has RUN scores from one end of a walk to the other:
threads add up what they found, and none asks another where its own go.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tandem_kernels.attention.index_numbers import LOWEST, STRIDE, floor_by, ordered
from tandem_kernels.attention.query_tiles import row_of_tile


@gluon.jit
def _added(one: gl.tensor, other: gl.tensor) -> gl.tensor:
    return one + other


@gluon.jit
def _gather(
    scores: gl.tensor, candidates: gl.tensor, first: gl.tensor, end: gl.tensor, floor: gl.tensor,
    CANDIDATES: gl.constexpr, BLOCK: gl.constexpr, num_warps: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Does what `index_select.gather` does."""
    THREADS: gl.constexpr = 32 * num_warps
    RUN: gl.constexpr = max(BLOCK // THREADS, 1)
    RUNS: gl.constexpr = gl.BlockedLayout([1, RUN], [32, 1], [num_warps, 1], [1, 0])
    THREAD: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    thread = gl.arange(0, THREADS, gl.SliceLayout(1, RUNS))
    lane = thread[:, None] * RUN + gl.arange(0, RUN, gl.SliceLayout(0, RUNS))[None, :]
    lowest = floor.to(gl.int32)
    found = first * 0
    for start in range(first, end, RUN * THREADS):
        position = start + lane
        inside = position < end
        number = ordered(scores + position, inside)
        taken = inside & (number >= lowest)
        count = taken.to(gl.int32)
        of_thread = gl.convert_layout(gl.sum(count, axis=1), THREAD)
        before = found + gl.associative_scan(of_thread, 0, _added) - of_thread
        place = (
            gl.convert_layout(before, gl.SliceLayout(1, RUNS))[:, None]
            + gl.associative_scan(count, 1, _added)
            - count
        )
        taken = taken & (place < CANDIDATES)
        gl.store(candidates + place, position, mask=taken)
        gl.store(candidates + CANDIDATES + place, number, mask=taken)
        found += gl.sum(of_thread, axis=0)
    return found


@gluon.jit(do_not_specialize=["first_tile", "num_reqs"])
def gather_candidates_kernel(
    scores: gl.tensor,
    query_start_loc: gl.tensor,
    seq_lens: gl.tensor,
    candidates: gl.tensor,
    found: gl.tensor,
    first_tile: gl.tensor,
    num_reqs: gl.tensor,
    width: gl.tensor,
    TOP_K: gl.constexpr, CANDIDATES: gl.constexpr, BLOCK: gl.constexpr, QUERY_LEN: gl.constexpr,
    BLOCK_Q: gl.constexpr, TOKENS: gl.constexpr, PARTS: gl.constexpr, num_warps: gl.constexpr,
) -> None:  # fmt: skip
    """Does what `index_select.gather_part_kernel` does."""
    local, split = gl.program_id(0), gl.program_id(1)
    token, length = row_of_tile(
        query_start_loc, seq_lens, local, first_tile, num_reqs, QUERY_LEN, BLOCK_Q, TOKENS
    )
    if (token < 0) | (length <= TOP_K):
        return
    own = scores + local.to(gl.int64) * width
    floor = length.to(gl.int64) * 0 + LOWEST
    if length > CANDIDATES:
        SAMPLE: gl.constexpr = gl.BlockedLayout([STRIDE], [32], [num_warps], [0])
        lane = gl.arange(0, CANDIDATES, SAMPLE)
        apart = length // (CANDIDATES // STRIDE) // STRIDE * STRIDE
        sample = ordered(own + lane // STRIDE * apart + lane % STRIDE, lane >= 0)
        floor = floor_by(sample, length, TOP_K, CANDIDATES)
    part = gl.cdiv(gl.cdiv(length, BLOCK), PARTS) * BLOCK
    first = split * part
    end = gl.minimum(first + part, length)
    at = local.to(gl.int64) * PARTS + split
    kept = candidates + at * (2 * CANDIDATES)
    gl.store(found + at, _gather(own, kept, first, end, floor, CANDIDATES, BLOCK, num_warps))
