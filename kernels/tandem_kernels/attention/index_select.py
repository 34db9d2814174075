"""The exact choice of the highest of rows of scores.

    sample     how high the highest are is guessed from some scores of the row
    gather     one walk over the row writes those that are as high, in order: candidates
    choose     the last one to be chosen is found among them by halving, in registers

A guess is good if there are at least as many candidates as are chosen, and no more than fit; until
it is, another walk tries another. So the choice is exact, and depends on nothing but the row: equal
scores are taken by position, and where more are equal than there is room for, one more walk takes
the first of them. Lengths are read on the device.

    rows enough for all SMs    a program does all of a row; of long ones, on Hopper, two
                               launches (`index_candidates`)
    few rows, long ones        parts of a row are gathered by programs of their own, and a second
                               launch chooses
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.index_candidates import gather_candidates_kernel
from tandem_kernels.attention.index_numbers import (
    HIGHEST,
    LOWEST,
    STRIDE,
    floor_by,
    floor_of,
    ordered,
)
from tandem_kernels.attention.query_tiles import row_of_tile
from tandem_kernels.device import has_warpgroup_mma, num_programs

_BLOCK, _WARPS = 2048, 8
REGISTERS = 80
"""Is the most of a thread: three programs share an SM, since each waits for its own sums (8192 rows
of 32k scores, H200: two thirds of the time that one program takes with all it wants)."""
_PROGRAMS_PER_SM = 4
_FEWEST_PARTS, _MOST_PARTS = 2, 32
_CANDIDATES_OF_PARTS = 4096
_STEP = tl.constexpr(1 << 18)
"""Says by how much a guess that was wrong is changed first: the 32nd part of a doubling."""


@triton.jit
def _guess(
    scores: tl.tensor, length: tl.tensor, TOP_K: tl.constexpr, CANDIDATES: tl.constexpr
) -> tl.tensor:
    """Returns `index_numbers.floor_by` a sample of a row. Of a row that has no more than CANDIDATES
    all scores reach it."""
    low = tl.full([], LOWEST, tl.int64)
    if length > CANDIDATES:
        lane = tl.arange(0, CANDIDATES)
        apart = length // (CANDIDATES // STRIDE) // STRIDE * STRIDE
        sample = ordered(scores + lane // STRIDE * apart + lane % STRIDE, lane >= 0)
        low = floor_by(sample, length, TOP_K, CANDIDATES)
    return low


@triton.jit
def _gather(
    scores: tl.tensor,
    candidates: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    floor: tl.tensor,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Writes which of the scores [first, end) reach `floor`, and behind CANDIDATES of them these as
    numbers. Returns how many there are, which may be more."""
    lane = tl.arange(0, BLOCK)
    found = tl.zeros([], tl.int32)
    lowest = floor.to(tl.int32)
    for start in range(first, end, BLOCK):
        position = start + lane
        inside = position < end
        number = ordered(scores + position, inside)
        taken = inside & (number >= lowest)
        count = taken.to(tl.int32)
        place = found + tl.cumsum(count, axis=0) - 1
        taken = taken & (place < CANDIDATES)
        tl.store(candidates + place, position, mask=taken)
        tl.store(candidates + CANDIDATES + place, number, mask=taken)
        found += tl.sum(count, axis=0)
    return found


@triton.jit
def _take(
    out: tl.tensor,
    position: tl.tensor,
    number: tl.tensor,
    inside: tl.tensor,
    floor: tl.tensor,
    left: tl.tensor,
    num_found: tl.tensor,
    num_equal: tl.tensor,
    TOP_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Writes which of a tile of a row are chosen: those above `floor`, and of the equal ones the
    first `left`. In front of them `num_found` are chosen and `num_equal` equal; returns both."""
    equal = (inside & (number == floor)).to(tl.int32)
    rank = num_equal + tl.cumsum(equal, axis=0)
    taken = (inside & (number > floor)) | ((equal > 0) & (rank <= left))
    count = taken.to(tl.int32)
    place = num_found + tl.cumsum(count, axis=0) - 1
    tl.store(out + place, position, mask=taken & (place < TOP_K))
    return num_found + tl.sum(count, axis=0), num_equal + tl.sum(equal, axis=0)


@triton.jit
def _choose(
    out: tl.tensor, position: tl.tensor, number: tl.tensor, floor: tl.tensor, TOP_K: tl.constexpr
) -> None:
    """Chooses among candidates, in order of positions, at least TOP_K of which reach `floor`. Those
    that are none have the lowest number."""
    high = tl.max(number, axis=0).to(tl.int64) + 1
    last = floor_of(number, floor, high, TOP_K, TOP_K).to(tl.int32)
    left = TOP_K - tl.sum((number > last).to(tl.int32), axis=0)
    none = tl.zeros([], tl.int32)
    _take(out, position, number, number > LOWEST, last, left, none, none, TOP_K)


@triton.jit
def _choose_ofrow_of_tile(
    scores: tl.tensor,
    out: tl.tensor,
    candidates: tl.tensor,
    length: tl.tensor,
    floor: tl.tensor,
    TOP_K: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Chooses of the scores [0, length), beginning with the guess `floor`."""
    low, high = tl.full([], LOWEST, tl.int64), tl.full([], HIGHEST, tl.int64)
    step = tl.full([], _STEP, tl.int64)
    above = tl.zeros([], tl.int32)
    found = _gather(scores, candidates, 0, length, floor, CANDIDATES, BLOCK)
    while ((found < TOP_K) | (found > CANDIDATES)) & (high - low > 1):
        above = tl.where(found < TOP_K, found, above)
        low = tl.where(found < TOP_K, low, floor)
        high = tl.where(found < TOP_K, floor, high)
        floor = tl.minimum(tl.maximum((low + high) >> 1, floor - step), floor + step)
        step *= 2
        tl.debug_barrier()
        found = _gather(scores, candidates, 0, length, floor, CANDIDATES, BLOCK)
    if found <= CANDIDATES:
        tl.debug_barrier()
        lane = tl.arange(0, CANDIDATES)
        position = tl.load(candidates + lane, mask=lane < found, other=0)
        number = tl.load(candidates + CANDIDATES + lane, mask=lane < found, other=LOWEST)
        _choose(out, position, number, floor, TOP_K)
    else:
        # More are equal to the last one to be chosen than there is room for.
        num_found, num_equal = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
        for start in range(0, length, BLOCK):
            position = start + tl.arange(0, BLOCK)
            inside = position < length
            number = ordered(scores + position, inside)
            num_found, num_equal = _take(
                out, position, number, inside, floor.to(tl.int32), TOP_K - above,
                num_found, num_equal, TOP_K,
            )  # fmt: skip


@triton.jit
def _take_all(out: tl.tensor, length: tl.tensor, TOP_K: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Writes all positions of a row that is no longer than what is chosen, and -1 behind them."""
    for start in range(0, TOP_K, BLOCK):
        position = start + tl.arange(0, BLOCK)
        found = tl.where(position < length, position, -1)
        tl.store(out + position, found, mask=position < TOP_K)


@triton.jit(do_not_specialize=["first_tile", "num_reqs"])
def select_kernel(
    scores: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    chosen: tl.tensor,
    candidates: tl.tensor,
    first_tile: tl.tensor,
    num_reqs: tl.tensor,
    width: tl.tensor,
    TOP_K: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Chooses, in program i, for row i of the scores. `candidates`: [rows, 2, CANDIDATES]."""
    local = tl.program_id(0)
    token, length = row_of_tile(
        query_start_loc, seq_lens, local, first_tile, num_reqs, QUERY_LEN, BLOCK_Q, TOKENS
    )
    if token < 0:
        return
    out = chosen + token.to(tl.int64) * TOP_K
    if length <= TOP_K:
        _take_all(out, length, TOP_K, BLOCK)
        return
    own = scores + local.to(tl.int64) * width
    kept = candidates + local.to(tl.int64) * (2 * CANDIDATES)
    guess = _guess(own, length, TOP_K, CANDIDATES)
    _choose_ofrow_of_tile(own, out, kept, length, guess, TOP_K, CANDIDATES, BLOCK)


@triton.jit(do_not_specialize=["first_tile", "num_reqs"])
def gather_part_kernel(
    scores: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    candidates: tl.tensor,
    found: tl.tensor,
    first_tile: tl.tensor,
    num_reqs: tl.tensor,
    width: tl.tensor,
    TOP_K: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Gathers candidates of part s of row i, in program (i, s), into `candidates`
    [rows, PARTS, 2, CANDIDATES]: `found` [rows, PARTS] of them."""
    local, split = tl.program_id(0), tl.program_id(1)
    token, length = row_of_tile(
        query_start_loc, seq_lens, local, first_tile, num_reqs, QUERY_LEN, BLOCK_Q, TOKENS
    )
    if (token < 0) | (length <= TOP_K):
        return
    own = scores + local.to(tl.int64) * width
    guess = _guess(own, length, TOP_K, CANDIDATES)
    part = tl.cdiv(tl.cdiv(length, BLOCK), PARTS) * BLOCK
    first = split * part
    end = tl.minimum(first + part, length)
    at = local.to(tl.int64) * PARTS + split
    kept = candidates + at * (2 * CANDIDATES)
    tl.store(found + at, _gather(own, kept, first, end, guess, CANDIDATES, BLOCK))


@triton.jit(do_not_specialize=["first_tile", "num_reqs"])
def select_part_kernel(
    scores: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    chosen: tl.tensor,
    candidates: tl.tensor,
    found: tl.tensor,
    first_tile: tl.tensor,
    num_reqs: tl.tensor,
    width: tl.tensor,
    TOP_K: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Chooses, in program i, among the candidates of row i that `gather_part_kernel` has found."""
    local = tl.program_id(0)
    token, length = row_of_tile(
        query_start_loc, seq_lens, local, first_tile, num_reqs, QUERY_LEN, BLOCK_Q, TOKENS
    )
    if token < 0:
        return
    out = chosen + token.to(tl.int64) * TOP_K
    if length <= TOP_K:
        _take_all(out, length, TOP_K, BLOCK)
        return
    lane = tl.arange(0, CANDIDATES)
    part, before = tl.zeros([CANDIDATES], tl.int32), tl.zeros([CANDIDATES], tl.int32)
    total = tl.zeros([], tl.int32)
    for split in tl.static_range(PARTS):
        total += tl.load(found + local * PARTS + split)
        behind = lane >= total
        part = tl.where(behind, split + 1, part)
        before = tl.where(behind, total, before)
    own = scores + local.to(tl.int64) * width
    kept = candidates + local.to(tl.int64) * (PARTS * 2 * CANDIDATES)
    if (total >= TOP_K) & (total <= CANDIDATES):
        inside = lane < total
        place = kept + part * (2 * CANDIDATES) + lane - before
        position = tl.load(place, mask=inside, other=0)
        number = tl.load(place + CANDIDATES, mask=inside, other=LOWEST)
        floor = tl.min(tl.where(inside, number, HIGHEST), axis=0).to(tl.int64)
        _choose(out, position, number, floor, TOP_K)
    else:
        guess = _guess(own, length, TOP_K, CANDIDATES)
        _choose_ofrow_of_tile(own, out, kept, length, guess, TOP_K, CANDIDATES, BLOCK)


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """Rows of scores of one turn.

    Attributes:
        query_start_loc, seq_lens: Of the step's requests.
        first_tile: Of the rows; each tile has `block_q`.
        query_len: Query tokens of each request; 0: they differ.
        width: Scores of a row.
        tokens: That a score stands for.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    first_tile: int
    num_tiles: int
    query_len: int
    block_q: int
    width: int
    tokens: int = 1

    @property
    def num_rows(self) -> int:
        return self.num_tiles * self.block_q


def select(scores: Tensor, rows: SelectedRows, chosen: Tensor) -> None:
    """Writes the positions of the highest of each row of `scores` [rows, width] into the rows of
    its token in `chosen` [tokens, top_k] int32, ascending."""
    parts = _num_parts(scores.device, rows)
    place = rows.first_tile, len(rows.seq_lens), rows.width
    bounds = rows.query_start_loc, rows.seq_lens
    top_k = chosen.shape[1]
    num_candidates = _num_candidates(top_k, parts)
    candidates = torch.empty(
        (rows.num_rows, parts, 2, num_candidates), dtype=torch.int32, device=scores.device
    )
    shape = {
        "TOP_K": top_k,
        "CANDIDATES": num_candidates,
        "BLOCK": _BLOCK,  # of short rows, too: their width would make kernels of its own
        "QUERY_LEN": rows.query_len,
        "BLOCK_Q": rows.block_q,
        "TOKENS": rows.tokens,
        "num_warps": _WARPS,
        "maxnreg": REGISTERS,
    }
    grid = (rows.num_rows,)
    # Of a short row most scores are candidates: then it is their places that take the time.
    is_long = rows.width > 2 * num_candidates and has_warpgroup_mma(scores.device)
    if parts == 1 and not is_long:
        select_kernel[grid](scores, *bounds, chosen, candidates, *place, **shape)
        return
    found = torch.empty((rows.num_rows, parts), dtype=torch.int32, device=scores.device)
    gather = gather_candidates_kernel if is_long else gather_part_kernel
    gather[(*grid, parts)](scores, *bounds, candidates, found, *place, PARTS=parts, **shape)
    select_part_kernel[grid](
        scores, *bounds, chosen, candidates, found, *place, PARTS=parts, **shape
    )


def _num_candidates(top_k: int, parts: int) -> int:
    """Returns for how many candidates of a row there is room. Of a long row few of a sample are
    among the highest, and a guess by few misses by much: of 131,072 scores a sample of 1024 has
    four of the 512 highest, and where it is wrong, walks by one program take 240 us."""
    fewest = triton.next_power_of_2(2 * top_k)
    return int(fewest if parts == 1 else max(fewest, min(_CANDIDATES_OF_PARTS, 4 * fewest)))


def _num_parts(device: torch.device, rows: SelectedRows) -> int:
    """Returns into how many parts a row is cut, a power of two: by shapes alone, so that it can be
    recorded. Where there are four for each row, half of them take less time: each guesses by itself
    (16 rows of 131,072 scores, H200: 28 us for 34)."""
    free = num_programs(device, _PROGRAMS_PER_SM) // rows.num_rows
    free = free // 2 if free >= 4 else free
    most = triton.next_power_of_2(triton.cdiv(rows.width, _BLOCK))
    parts = min(int(most), 1 << max(free.bit_length() - 1, 0), _MOST_PARTS)
    return parts if parts >= _FEWEST_PARTS else 1
