"""The exact choice of the highest of rows of scores.

The highest are found by their bits, eight at a time from the top: how many scores have each value
of the next eight says which of them the last one to be chosen has. So the choice is exact, in five
walks over a row, whatever its length; equal scores are taken by position. Lengths are read on the
device.

    rows enough for all SMs    a program walks a row five times
    few rows, long ones        parts of a row are programs of their own; each walk is a launch,
                               which adds what its parts have counted, and the last one writes
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.prefill_attention import request_of
from tandem_kernels.device import num_programs

_BLOCK, _WARPS = 4096, 16
_PART_BLOCK, _PART_WARPS = 4096, 8
_PROGRAMS_PER_SM = 4
_FEWEST_PARTS = 4
"""Is the number from which on the launches take less than the walks that they spare."""


@triton.jit
def request_of_tile(
    query_start_loc: tl.tensor,
    tile: tl.tensor,
    num_reqs: tl.tensor,
    QUERY_LEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
) -> tl.tensor:
    """Returns the request of a tile, its first query row, and the first token of the tile."""
    if QUERY_LEN > 0:
        r = tile
        first_token = tile * 0
    else:
        r = request_of(query_start_loc, tile, 0, num_reqs, BLOCK_Q)
        start = tl.load(query_start_loc + r)
        first_token = (tile - start // BLOCK_Q - r) * BLOCK_Q
    return r, tl.load(query_start_loc + r), first_token


@triton.jit
def _row(
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    local: tl.tensor,
    first_tile: tl.tensor,
    num_reqs: tl.tensor,
    QUERY_LEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
) -> tl.tensor:
    """Returns the token of a row, -1: none, and how many scores it has."""
    r, query_start, first_token = request_of_tile(
        query_start_loc, first_tile + local // BLOCK_Q, num_reqs, QUERY_LEN, BLOCK_Q
    )
    token = first_token + local % BLOCK_Q
    num_tokens = tl.load(query_start_loc + r + 1) - query_start
    length = tl.load(seq_lens + r) - num_tokens + token + 1
    return tl.where(token < num_tokens, query_start + token, -1), length


@triton.jit
def _ordered(scores: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Loads scores as uint32 numbers of the same order; both zeros are one."""
    bits = tl.load(scores, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    turned = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return turned.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _counts(
    scores: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    prefix: tl.tensor,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Counts, of the scores [first, end) that begin with the bits `prefix`, how many have each
    value of the eight bits from SHIFT on: [256] int32."""
    counts = tl.zeros([256], tl.int32)
    lane = tl.arange(0, BLOCK)
    for start in range(first, end, BLOCK):
        position = start + lane
        same = position < end
        number = _ordered(scores + position, same)
        if SHIFT < 24:
            same = same & ((number >> (SHIFT + 8)) == prefix)
        digits = ((number >> SHIFT) & 0xFF).to(tl.int32)
        counts += tl.histogram(digits, 256, mask=same)
    return counts


@triton.jit
def _narrowed(counts: tl.tensor, prefix: tl.tensor, left: tl.tensor) -> tl.tensor:
    """Returns `prefix` with the next eight bits of the last score to be chosen, and how many of
    those that begin with it are to be taken; `left` of those that began with the old one."""
    bins = tl.arange(0, 256)
    above = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)
    is_last = (above < left) & (above + counts >= left)
    digit = tl.sum(tl.where(is_last, bins, 0), axis=0)
    left -= tl.sum(tl.where(is_last, above, 0), axis=0)
    return (prefix << 8) | digit.to(tl.uint32), left


@triton.jit
def _take(
    scores: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    prefix: tl.tensor,
    left: tl.tensor,
    num_found: tl.tensor,
    num_equal: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Writes which of the scores [first, end) are chosen: those above `prefix`, and of the equal
    ones the first `left`. In front of them `num_found` are chosen and `num_equal` equal."""
    lane = tl.arange(0, BLOCK)
    for start in range(first, end, BLOCK):
        position = start + lane
        inside = position < end
        number = _ordered(scores + position, inside)
        equal = (inside & (number == prefix)).to(tl.int32)
        rank = num_equal + tl.cumsum(equal, axis=0)
        taken = (inside & (number > prefix)) | ((equal > 0) & (rank <= left))
        count = taken.to(tl.int32)
        place = num_found + tl.cumsum(count, axis=0) - 1
        tl.store(out + place, position, mask=taken)
        num_found += tl.sum(count, axis=0)
        num_equal += tl.sum(equal, axis=0)


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
    first_tile: tl.tensor,
    num_reqs: tl.tensor,
    width: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
) -> None:
    """Chooses, in program i, for row i of the scores."""
    local = tl.program_id(0)
    token, length = _row(query_start_loc, seq_lens, local, first_tile, num_reqs, QUERY_LEN, BLOCK_Q)
    if token < 0:
        return
    out = chosen + token.to(tl.int64) * TOP_K
    if length <= TOP_K:
        _take_all(out, length, TOP_K, BLOCK)
        return
    own = scores + local.to(tl.int64) * width
    prefix = tl.zeros([], tl.uint32)
    left = tl.full([], TOP_K, tl.int32)
    for step in tl.static_range(4):
        counts = _counts(own, 0, length, prefix, 24 - 8 * step, BLOCK)
        prefix, left = _narrowed(counts, prefix, left)
    none = tl.zeros([], tl.int32)
    _take(own, out, 0, length, prefix, left, none, none, BLOCK)


@triton.jit(do_not_specialize=["first_tile", "num_reqs", "num_rows"])
def select_part_kernel(
    scores: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    chosen: tl.tensor,
    counted: tl.tensor,
    of_parts: tl.tensor,
    first_tile: tl.tensor,
    num_reqs: tl.tensor,
    width: tl.tensor,
    num_rows: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Does walk STEP over part s of row i, in program (i, s): 0 to 3 count bits into `counted`
    [4, rows, 256], 4 counts what is chosen of each part into `of_parts` [rows, parts, 2], above the
    last score and equal to it, and 5 writes."""
    local, split = tl.program_id(0), tl.program_id(1)
    token, length = _row(query_start_loc, seq_lens, local, first_tile, num_reqs, QUERY_LEN, BLOCK_Q)
    if token < 0:
        return
    out = chosen + token.to(tl.int64) * TOP_K
    if length <= TOP_K:
        if (STEP == 5) & (split == 0):
            _take_all(out, length, TOP_K, BLOCK)
        return
    own = scores + local.to(tl.int64) * width
    part = tl.cdiv(tl.cdiv(length, BLOCK), PARTS) * BLOCK
    first = split * part
    end = tl.minimum(first + part, length)
    bins = tl.arange(0, 256)
    prefix = tl.zeros([], tl.uint32)
    left = tl.full([], TOP_K, tl.int32)
    for step in tl.static_range(min(STEP, 4)):
        counts = tl.load(counted + (step * num_rows + local) * 256 + bins)
        prefix, left = _narrowed(counts, prefix, left)
    if STEP < 4:
        counts = _counts(own, first, end, prefix, 24 - 8 * STEP, BLOCK)
        place = counted + (STEP * num_rows + local) * 256 + bins
        tl.atomic_add(place, counts, mask=counts > 0)
        return
    at = of_parts + (local * PARTS + split) * 2
    if STEP == 4:
        above, equal = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
        for start in range(first, end, BLOCK):
            position = start + tl.arange(0, BLOCK)
            inside = position < end
            number = _ordered(own + position, inside)
            above += tl.sum((inside & (number > prefix)).to(tl.int32), axis=0)
            equal += tl.sum((inside & (number == prefix)).to(tl.int32), axis=0)
        tl.store(at, above)
        tl.store(at + 1, equal)
        return
    parts = tl.arange(0, PARTS)
    before = parts < split
    pairs = of_parts + (local * PARTS + parts) * 2
    num_above = tl.sum(tl.load(pairs, mask=before, other=0), axis=0)
    num_equal = tl.sum(tl.load(pairs + 1, mask=before, other=0), axis=0)
    num_found = num_above + tl.minimum(num_equal, left)
    _take(own, out, first, end, prefix, left, num_found, num_equal, BLOCK)


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """Rows of scores of one turn.

    Attributes:
        query_start_loc, seq_lens: Of the step's requests.
        first_tile: Of the rows; each tile has `block_q`.
        query_len: Query tokens of each request; 0: they differ.
        width: Scores of a row.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    first_tile: int
    num_tiles: int
    query_len: int
    block_q: int
    width: int

    @property
    def num_rows(self) -> int:
        return self.num_tiles * self.block_q


def select(scores: Tensor, rows: SelectedRows, chosen: Tensor) -> None:
    """Writes the positions of the highest of each row of `scores` [rows, width] into the rows of
    its token in `chosen` [tokens, top_k] int32, ascending."""
    parts = _num_parts(scores.device, rows)
    place = rows.first_tile, len(rows.seq_lens), rows.width
    given = scores, rows.query_start_loc, rows.seq_lens, chosen
    shape = {"TOP_K": chosen.shape[1], "QUERY_LEN": rows.query_len, "BLOCK_Q": rows.block_q}
    if parts < _FEWEST_PARTS:
        block = min(_BLOCK, triton.next_power_of_2(rows.width))
        grid = (rows.num_rows,)
        select_kernel[grid](*given, *place, BLOCK=block, num_warps=_WARPS, **shape)
        return
    counted = torch.zeros((4, rows.num_rows, 256), dtype=torch.int32, device=scores.device)
    of_parts = torch.empty((rows.num_rows, parts, 2), dtype=torch.int32, device=scores.device)
    for step in range(6):
        select_part_kernel[(rows.num_rows, parts)](
            *given,
            counted,
            of_parts,
            *place,
            rows.num_rows,
            BLOCK=_PART_BLOCK,
            STEP=step,
            PARTS=parts,
            num_warps=_PART_WARPS,
            **shape,
        )


def _num_parts(device: torch.device, rows: SelectedRows) -> int:
    """Returns into how many parts a row is cut, a power of two: by shapes alone, so that it can be
    recorded."""
    free = num_programs(device, _PROGRAMS_PER_SM) // rows.num_rows
    most = triton.next_power_of_2(triton.cdiv(rows.width, _PART_BLOCK))
    return min(int(most), 1 << max(free.bit_length() - 1, 0))
