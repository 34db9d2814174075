"""Index scores of a step's tokens, and the exact choice of the highest.

    rows of one request  | q0 q1 .. |  BLOCK_Q of them a tile
    scores   [rows, width] float32     part s of the context in program (tile, s)
    chosen   [tokens, top_k]           a row in each program

The highest are found by their bits, eight at a time from the top: how many scores have each value
of the next eight says which of them the last one to be chosen has. So the choice is exact, in five
walks over a row, whatever its length; equal scores are taken by position. Lengths are read on the
device. Rows whose scores do not fit the buffer together are computed in turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.index_pages import IndexPages
from tandem_kernels.attention.prefill_attention import request_of
from tandem_kernels.device import num_programs

_SCORES_AT_ONCE = 1 << 26
"""Is the size of the buffer: 256 MiB."""
_TILE, _BLOCK_Q, _PROGRAMS_PER_SM = 128, 8, 4
_SELECT_BLOCK, _SELECT_WARPS = 4096, 16


@triton.jit
def _request(
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


@triton.jit(do_not_specialize=["first_tile", "num_reqs"])
def index_scores_kernel(
    q: tl.tensor,
    head_weights: tl.tensor,
    keys: tl.tensor,
    key_scales: tl.tensor,
    block_tables: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    scores: tl.tensor,
    first_tile: tl.tensor,
    num_reqs: tl.tensor,
    width: tl.tensor,
    key_block_stride: tl.tensor,
    scale_block_stride: tl.tensor,
    table_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """Scores, in program (i, s), part s of the context for the tokens of tile i. Of contexts that
    are chosen as a whole nothing is written.

    QUERY_LEN: Query tokens of each request; 0: they differ.
    """
    local = tl.program_id(0)
    r, query_start, first_token = _request(
        query_start_loc, first_tile + local, num_reqs, QUERY_LEN, BLOCK_Q
    )
    num_tokens = tl.load(query_start_loc + r + 1) - query_start
    seq_len = tl.load(seq_lens + r)
    last_token = tl.minimum(first_token + BLOCK_Q, num_tokens)
    needed = seq_len - num_tokens + last_token
    if (first_token >= num_tokens) | (needed <= TOP_K):
        return
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, D)
    lane = tl.arange(0, TILE)
    is_head = head < NUM_HEADS
    table = block_tables + r.to(tl.int64) * table_stride
    part = tl.cdiv(tl.cdiv(needed, TILE), tl.num_programs(1)) * TILE
    first = tl.program_id(1) * part
    for start in range(first, tl.minimum(first + part, needed), TILE):
        position = start + lane
        inside = position < needed
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = position % BLOCK_SIZE
        place = keys + block * key_block_stride + offset * D
        key = tl.load(place[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
        scale = tl.full([TILE], 1.0, tl.float32)
        if FP8:
            place = key_scales + block * scale_block_stride + offset
            scale = tl.load(place, mask=inside, other=0.0)
        for token in range(first_token, last_token):
            at = (query_start + token).to(tl.int64) * NUM_HEADS + head
            query = tl.load(q + at[:, None] * D + dim[None, :], mask=is_head[:, None], other=0.0)
            weight = tl.load(head_weights + at, mask=is_head, other=0.0)
            products = tl.dot(key, tl.trans(query), input_precision=PRECISION)
            score = tl.sum(tl.maximum(products, 0.0) * weight[None, :], axis=1) * scale
            row = (local * BLOCK_Q + token - first_token).to(tl.int64)
            tl.store(scores + row * width + position, score, mask=inside)


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
    length: tl.tensor,
    prefix: tl.tensor,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Counts, of the scores that begin with the bits `prefix`, how many have each value of the
    eight bits from SHIFT on: [256] int32."""
    counts = tl.zeros([256], tl.int32)
    lane = tl.arange(0, BLOCK)
    for start in range(0, length, BLOCK):
        position = start + lane
        same = position < length
        number = _ordered(scores + position, same)
        if SHIFT < 24:
            same = same & ((number >> (SHIFT + 8)) == prefix)
        digits = ((number >> SHIFT) & 0xFF).to(tl.int32)
        counts += tl.histogram(digits, 256, mask=same)
    return counts


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
    r, query_start, first_token = _request(
        query_start_loc, first_tile + local // BLOCK_Q, num_reqs, QUERY_LEN, BLOCK_Q
    )
    token = first_token + local % BLOCK_Q
    num_tokens = tl.load(query_start_loc + r + 1) - query_start
    if token >= num_tokens:
        return
    lane = tl.arange(0, BLOCK)
    out = chosen + (query_start + token).to(tl.int64) * TOP_K
    length = tl.load(seq_lens + r) - num_tokens + token + 1
    if length <= TOP_K:
        for start in range(0, TOP_K, BLOCK):
            position = start + lane
            found = tl.where(position < length, position, -1)
            tl.store(out + position, found, mask=position < TOP_K)
        return
    own = scores + local.to(tl.int64) * width
    bins = tl.arange(0, 256)
    prefix = tl.zeros([], tl.uint32)
    left = tl.full([], TOP_K, tl.int32)
    for step in tl.static_range(4):
        counts = _counts(own, length, prefix, 24 - 8 * step, BLOCK)
        above = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)
        is_last = (above < left) & (above + counts >= left)
        digit = tl.sum(tl.where(is_last, bins, 0), axis=0)
        left -= tl.sum(tl.where(is_last, above, 0), axis=0)
        prefix = (prefix << 8) | digit.to(tl.uint32)
    num_found = tl.zeros([], tl.int32)
    num_equal = tl.zeros([], tl.int32)
    for start in range(0, length, BLOCK):
        position = start + lane
        inside = position < length
        number = _ordered(own + position, inside)
        equal = (inside & (number == prefix)).to(tl.int32)
        rank = num_equal + tl.cumsum(equal, axis=0)
        taken = (inside & (number > prefix)) | ((equal > 0) & (rank <= left))
        count = taken.to(tl.int32)
        place = num_found + tl.cumsum(count, axis=0) - 1
        tl.store(out + place, position, mask=taken)
        num_found += tl.sum(count, axis=0)
        num_equal += tl.sum(equal, axis=0)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Says how a step is cut: by shapes alone, so that it can be recorded.

    Attributes:
        query_len, block_q: Query tokens of each request (0: they differ), and of a tile.
        num_tiles, at_once: Tiles of the step, and of each turn.
        width: Scores of a row.
        splits: Parts of a context.
    """

    query_len: int
    block_q: int
    num_tiles: int
    at_once: int
    width: int
    splits: int

    @classmethod
    def of(cls, q: Tensor, pages: IndexPages, metadata: AttentionMetadata) -> _Plan:
        num_reqs, query_len = metadata.seq_lens.shape[0], metadata.uniform_query_len
        block_q = triton.next_power_of_2(query_len) if query_len else _BLOCK_Q
        num_tiles = num_reqs if query_len else triton.cdiv(len(q), block_q) + num_reqs
        room = metadata.block_tables.shape[1] * pages.keys.shape[1]
        num_parts = triton.cdiv(min(metadata.max_seq_len, room), _TILE)
        width = num_parts * _TILE
        at_once = min(num_tiles, max(1, _SCORES_AT_ONCE // (width * block_q)))
        free = num_programs(q.device, _PROGRAMS_PER_SM) // at_once
        splits = min(triton.next_power_of_2(num_parts), 1 << max(free.bit_length() - 1, 0))
        return cls(query_len, block_q, num_tiles, at_once, width, splits)


def index_topk(
    q: Tensor,
    head_weights: Tensor,
    pages: IndexPages,
    metadata: AttentionMetadata,
    top_k: int,
) -> Tensor:
    """See `reference.index.index_topk`."""
    plan = _Plan.of(q, pages, metadata)
    chosen = torch.empty((len(q), top_k), dtype=torch.int32, device=q.device)
    rows = plan.at_once * plan.block_q
    scores = torch.empty((rows, plan.width), dtype=torch.float32, device=q.device)
    bounds, seq_lens = metadata.query_start_loc, metadata.seq_lens
    shape = {"TOP_K": top_k, "QUERY_LEN": plan.query_len, "BLOCK_Q": plan.block_q}
    for first in range(0, plan.num_tiles, plan.at_once):
        count = min(plan.at_once, plan.num_tiles - first)
        place = first, len(seq_lens), plan.width
        index_scores_kernel[(count, plan.splits)](
            q,
            head_weights,
            pages.keys,
            pages.scales,
            metadata.block_tables,
            bounds,
            seq_lens,
            scores,
            *place,
            pages.keys.stride(0),
            0 if pages.scales is None else pages.scales.stride(0),
            metadata.block_tables.stride(0),
            NUM_HEADS=q.shape[1],
            HEADS=max(16, triton.next_power_of_2(q.shape[1])),
            D=q.shape[2],
            BLOCK_SIZE=pages.keys.shape[1],
            TILE=_TILE,
            PRECISION="ieee" if pages.scales is None else "tf32",
            FP8=pages.scales is not None,
            num_warps=4,
            num_stages=2,
            **shape,
        )
        select_kernel[(count * plan.block_q,)](
            scores,
            bounds,
            seq_lens,
            chosen,
            *place,
            BLOCK=min(_SELECT_BLOCK, triton.next_power_of_2(plan.width)),
            num_warps=_SELECT_WARPS,
            **shape,
        )
    return chosen
