"""The line of tiles that the programs of decode attention share out; see `decode_attention`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def skipped(seq_len: tl.tensor, TILE: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """Returns the number of tiles before the one where the window begins."""
    if WINDOW > 0:
        return tl.maximum(seq_len - WINDOW, 0) // TILE
    return seq_len * 0


@triton.jit
def line(
    seq_lens: tl.tensor,
    num_reqs: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    REQS: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Lengths [REQS], ends of the requests' stretches of the line [REQS], its whole length."""
    r = tl.arange(0, REQS)
    seq_len = tl.load(seq_lens + r, mask=r < num_reqs, other=0)
    tiles = (tl.cdiv(seq_len, TILE) - skipped(seq_len, TILE, WINDOW)) * NUM_KV_HEADS
    return seq_len, tl.cumsum(tiles, axis=0), tl.sum(tiles, axis=0)


@triton.jit
def find(ends: tl.tensor, place: tl.tensor) -> tl.tensor:
    """Returns the request whose stretch holds `place`, and where that stretch begins."""
    before = ends <= place
    return tl.sum(before.to(tl.int32), axis=0), tl.max(tl.where(before, ends, 0), axis=0)


@triton.jit
def runs(
    seq_len: tl.tensor,
    ends: tl.tensor,
    length: tl.tensor,
    programs: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """Returns the tiles of a run, what the stretch of a head is a multiple of, ends of the
    requests' stretches [REQS], and the line's length. EVEN: no two heads share a run, where there
    are programs enough; else stretches are multiples of 1."""
    run = tl.cdiv(length, programs)
    step = 1
    if EVEN:
        tiles = tl.cdiv(seq_len, TILE) - skipped(seq_len, TILE, WINDOW)
        longest = tl.maximum(tl.max(tiles, axis=0), 1)
        even = tl.cdiv(longest, tl.cdiv(longest, tl.maximum(run, 1)))
        fits = tl.sum(tl.cdiv(tiles, even), axis=0) * NUM_KV_HEADS <= programs
        run = tl.where(fits, even, run)
        step = tl.where(fits, run, 1)
        tiles = tl.cdiv(tiles, step) * step * NUM_KV_HEADS
        ends, length = tl.cumsum(tiles, axis=0), tl.sum(tiles, axis=0)
    return run, step, ends, length


@triton.jit
def aligned_run(seq_len: tl.tensor, run: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Returns the tiles of a run such that the longest of `seq_len` is cut into equal parts, where
    that makes runs longer by no more than a third: contexts of one length are then cut alike, or
    not at all, and have fewer parts."""
    longest = tl.cdiv(tl.max(seq_len, axis=0), TILE)
    parts = tl.maximum(longest // tl.maximum(run, 1), 1)
    aligned = tl.maximum(tl.cdiv(longest, parts), run)
    return tl.where(3 * aligned <= 4 * run, aligned, run)
