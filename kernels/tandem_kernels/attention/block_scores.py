"""Scores of blocks of a context, and the choice of the highest.

    rows of one request  | q0 q1 .. |  BLOCK_Q tokens of them a tile
    scores   [tokens, groups, width] float32     blocks of part s in program (tile, s)
    chosen   [tokens, groups, top_k]

A program holds the queries of its tokens, one of each group, and walks over blocks of index keys;
each of them is multiplied by all at once. The highest of a row are found one by one: there are few
to be found. Lengths are read on the device. Rows whose scores do not fit the buffer together are
computed in turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.block_choice import BlockChoice
from tandem_kernels.attention.index_pages import IndexPages
from tandem_kernels.attention.query_tiles import request_of_tile
from tandem_kernels.device import num_programs
from tandem_kernels.product_precision import precision_of

_SCORES_AT_ONCE = 1 << 25
"""Is the size of the buffer: 128 MiB."""
_ALIGNED = 16
"""Triton compiles anew for a stride that is no multiple of it."""
_ROWS, _PROGRAMS_PER_SM = 64, 4
"""The first are of a tile of prompts."""
_FEWEST_ROWS = 16
"""A matrix unit takes no fewer."""


@triton.jit(do_not_specialize=["first_tile", "num_reqs"])
def block_scores_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    block_tables: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    scores: tl.tensor,
    first_tile: tl.tensor,
    num_reqs: tl.tensor,
    width: tl.tensor,
    q_stride: tl.tensor,
    key_block_stride: tl.tensor,
    table_stride: tl.tensor,
    GROUPS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    LOCAL: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Scores, in program (i, s), part s of the blocks for the tokens of tile i. Of contexts that
    are chosen as a whole nothing is written.

    SIZE: Tokens of a block. BLOCK_SIZE: Of a page. QUERY_LEN: Of each request; 0: they differ.
    """
    local = tl.program_id(0)
    r, query_start, first_token = request_of_tile(
        query_start_loc, first_tile + local, num_reqs, QUERY_LEN, BLOCK_Q
    )
    num_tokens = tl.load(query_start_loc + r + 1) - query_start
    seq_len = tl.load(seq_lens + r)
    last_token = tl.minimum(first_token + BLOCK_Q, num_tokens)
    needed = seq_len - num_tokens + last_token
    if (first_token >= num_tokens) | (needed <= TOP_K * SIZE):
        return
    dim = tl.arange(0, D)
    lane = tl.arange(0, SIZE)
    row = tl.arange(0, BLOCK_Q * GROUP_LANES)
    group = row % GROUP_LANES
    own = row // GROUP_LANES
    token = first_token + own
    real = (token < last_token) & (group < GROUPS)
    at = q + (query_start + token).to(tl.int64) * q_stride + group * D
    query = tl.load(at[:, None] + dim[None, :], mask=real[:, None], other=0.0)
    last = seq_len - num_tokens + token
    to = scores + ((local * BLOCK_Q + own).to(tl.int64) * GROUPS + group) * width
    table = block_tables + r.to(tl.int64) * table_stride
    num_blocks = tl.cdiv(needed, SIZE)
    part = tl.cdiv(num_blocks, tl.num_programs(1))
    first = tl.program_id(1) * part
    for block in range(first, tl.minimum(first + part, num_blocks)):
        position = block * SIZE + lane
        inside = position < needed
        if BLOCK_SIZE % SIZE == 0:
            page = tl.load(table + block * SIZE // BLOCK_SIZE).to(tl.int64)
        else:
            page = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        place = keys + page * key_block_stride + position % BLOCK_SIZE * D
        key = tl.load(place[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
        products = tl.dot(key, tl.trans(query), input_precision=PRECISION)
        products = tl.where(position[:, None] <= last[None, :], products, float("-inf"))
        best = tl.max(products, axis=0)
        newest = last // SIZE
        is_near = (block <= newest) & (block > newest - LOCAL)
        tl.store(to + block, tl.where(is_near, float("inf"), best), mask=real)


@triton.jit(do_not_specialize=["first_tile", "num_reqs"])
def choose_blocks_kernel(
    scores: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    chosen: tl.tensor,
    first_tile: tl.tensor,
    num_reqs: tl.tensor,
    width: tl.tensor,
    GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_LANES: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
) -> None:
    """Chooses, in program (i, g), for row i and group g."""
    local = tl.program_id(0)
    group = tl.program_id(1)
    r, query_start, first_token = request_of_tile(
        query_start_loc, first_tile + local // BLOCK_Q, num_reqs, QUERY_LEN, BLOCK_Q
    )
    token = first_token + local % BLOCK_Q
    num_tokens = tl.load(query_start_loc + r + 1) - query_start
    if token >= num_tokens:
        return
    seq_len = tl.load(seq_lens + r)
    seen = tl.where(seq_len > 0, seq_len - num_tokens + token + 1, 0)
    num_blocks = tl.cdiv(seen, SIZE)
    out = chosen + ((query_start + token).to(tl.int64) * GROUPS + group) * TOP_K
    if num_blocks <= TOP_K:
        place = tl.arange(0, TOP_LANES)
        tl.store(out + place, tl.where(place < num_blocks, place, -1), mask=place < TOP_K)
        return
    lane = tl.arange(0, WIDTH)
    inside = lane < num_blocks
    own = scores + (local.to(tl.int64) * GROUPS + group) * width
    left = tl.load(own + lane, mask=inside, other=float("-inf"))
    left = tl.where(left != left, float("-inf"), left)
    taken = lane < 0
    for _ in range(TOP_K):
        is_best = (left == tl.max(left, axis=0)) & inside & (taken == 0)
        best = tl.min(tl.where(is_best, lane, WIDTH), axis=0)
        taken = taken | (lane == best)
        left = tl.where(lane == best, float("-inf"), left)
    place = tl.cumsum(taken.to(tl.int32), axis=0) - 1
    tl.store(out + place, lane, mask=taken)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Says how a step is cut: by shapes alone, so that it can be recorded.

    Attributes:
        query_len, block_q: Query tokens of each request (0: they differ), and of a tile.
        num_tiles, at_once: Tiles of the step, and of each turn.
        width: Blocks of a row, and what makes it as aligned as any.
        splits: Parts of a context.
    """

    query_len: int
    block_q: int
    num_tiles: int
    at_once: int
    width: int
    splits: int

    @classmethod
    def of(
        cls, q: Tensor, pages: IndexPages, metadata: AttentionMetadata, choice: BlockChoice
    ) -> _Plan:
        num_reqs, groups = metadata.seq_lens.shape[0], q.shape[1]
        lanes = triton.next_power_of_2(groups)
        block_q = max(1, _ROWS // lanes)
        query_len = 0 if metadata.fixed_order else metadata.uniform_query_len
        if query_len > block_q:
            query_len = 0
        if query_len:
            block_q = max(triton.next_power_of_2(query_len), triton.cdiv(_FEWEST_ROWS, lanes))
        num_tiles = num_reqs if query_len else triton.cdiv(len(q), block_q) + num_reqs
        room = metadata.block_tables.shape[1] * pages.keys.shape[1]
        blocks = triton.cdiv(min(metadata.max_seq_len, room), choice.size)
        width = triton.cdiv(blocks, _ALIGNED) * _ALIGNED
        at_once = min(num_tiles, max(1, _SCORES_AT_ONCE // (width * block_q * groups)))
        free = num_programs(q.device, _PROGRAMS_PER_SM) // at_once
        splits = min(triton.next_power_of_2(blocks), 1 << max(free.bit_length() - 1, 0))
        return cls(query_len, block_q, num_tiles, at_once, width, splits)


def choose_blocks(
    q: Tensor, pages: IndexPages, metadata: AttentionMetadata, choice: BlockChoice
) -> Tensor:
    """See `reference.block_sparse.choose_blocks`. The groups of one token must be adjacent."""
    plan, groups = _Plan.of(q, pages, metadata, choice), q.shape[1]
    chosen = torch.empty((*q.shape[:2], choice.top_k), dtype=torch.int32, device=q.device)
    rows = plan.at_once * plan.block_q
    scores = torch.empty((rows, groups, plan.width), dtype=torch.float32, device=q.device)
    bounds, seq_lens = metadata.query_start_loc, metadata.seq_lens
    shape = {
        "GROUPS": groups, "TOP_K": choice.top_k, "SIZE": choice.size,
        "QUERY_LEN": plan.query_len, "BLOCK_Q": plan.block_q,
    }  # fmt: skip
    many = triton.next_power_of_2(plan.width)
    for first in range(0, plan.num_tiles, plan.at_once):
        count = min(plan.at_once, plan.num_tiles - first)
        block_scores_kernel[(count, plan.splits)](
            q,
            pages.keys,
            metadata.block_tables,
            bounds,
            seq_lens,
            scores,
            first,
            len(seq_lens),
            plan.width,
            q.stride(0),
            pages.keys.stride(0),
            metadata.block_tables.stride(0),
            GROUP_LANES=triton.next_power_of_2(groups),
            D=q.shape[2],
            LOCAL=choice.local,
            BLOCK_SIZE=pages.keys.shape[1],
            PRECISION=precision_of(q),
            num_warps=4,
            num_stages=1 if q.dtype == torch.float32 else 3,
            **shape,
        )
        choose_blocks_kernel[(count * plan.block_q, groups)](
            scores,
            bounds,
            seq_lens,
            chosen,
            first,
            len(seq_lens),
            plan.width,
            TOP_LANES=triton.next_power_of_2(choice.top_k),
            WIDTH=many,
            num_warps=1 if many <= 256 else 4,
            **shape,
        )
    return chosen
