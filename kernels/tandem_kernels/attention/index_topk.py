"""Index scores of a step's tokens, and the choice of the highest (`index_select`).

    rows of one request  | q0 q1 .. |  BLOCK_Q of them a tile
    scores   [rows, width] float32     part s of the context in program (tile, s)
    chosen   [tokens, top_k]

A program holds the heads of its tokens and walks over keys; each of them is multiplied by all at
once. Lengths are read on the device. Rows whose scores do not fit the buffer together are computed
in turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.index_pages import IndexPages
from tandem_kernels.attention.index_scores_ahead import index_scores_ahead_kernel
from tandem_kernels.attention.index_select import SelectedRows, select
from tandem_kernels.attention.query_tiles import request_of_tile
from tandem_kernels.device import has_warpgroup_mma, num_programs

_SCORES_AT_ONCE = 1 << 26
"""Is the size of the buffer: 256 MiB."""
_TILE, _BLOCK_Q, _PROGRAMS_PER_SM = 64, 4, 5
"""Are keys and tokens of a tile, and programs that share an SM: five score 16 rows of 131,072 keys
in 77 us, and four in 81 (H200)."""
STAGES_AHEAD = 4
"""Counts tiles of keys that `index_scores_ahead_kernel` has memory for."""


@triton.jit
def _block(
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Returns the block of each key of a tile, or the one of all."""
    if BLOCK_SIZE % TILE == 0:
        found = tl.load(table + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        position = start + tl.arange(0, TILE)
        found = tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)
    return found


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
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """Scores, in program (i, s), part s of the context for the tokens of tile i. Of contexts that
    are chosen as a whole nothing is written.

    QUERY_LEN: Query tokens of each request; 0: they differ.
    """
    local = tl.program_id(0)
    r, query_start, first_token = request_of_tile(
        query_start_loc, first_tile + local, num_reqs, QUERY_LEN, BLOCK_Q
    )
    num_tokens = tl.load(query_start_loc + r + 1) - query_start
    seq_len = tl.load(seq_lens + r)
    last_token = tl.minimum(first_token + BLOCK_Q, num_tokens)
    needed = (seq_len - num_tokens + last_token) // TOKENS
    if (first_token >= num_tokens) | (needed <= TOP_K):
        return
    dim = tl.arange(0, D)
    lane = tl.arange(0, TILE)
    row = tl.arange(0, BLOCK_Q * HEADS)
    head = row % HEADS
    token = first_token + row // HEADS
    real = (token < last_token) & (head < NUM_HEADS)
    at = (query_start + token).to(tl.int64) * NUM_HEADS + head
    query = tl.load(q + at[:, None] * D + dim[None, :], mask=real[:, None], other=0.0)
    # x + |x| takes half the time of the larger of x and zero, and is twice as much, exactly.
    weight = tl.load(head_weights + at, mask=real, other=0.0) * 0.5
    own = tl.arange(0, BLOCK_Q)
    to = scores + (local * BLOCK_Q + own).to(tl.int64) * width
    is_token = first_token + own < last_token
    table = block_tables + r.to(tl.int64) * table_stride
    part = tl.cdiv(tl.cdiv(needed, TILE), tl.num_programs(1)) * TILE
    first = tl.program_id(1) * part
    end = tl.minimum(first + part, needed)
    block = _block(table, first, end, BLOCK_SIZE, TILE)
    for start in range(first, end, TILE):
        position = start + lane
        inside = position < end
        place = block.to(tl.int64) * key_block_stride + position % BLOCK_SIZE * D
        key = tl.load(keys + place[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
        scale = tl.full([TILE], 1.0, tl.float32)
        if FP8:
            place = block.to(tl.int64) * scale_block_stride + position % BLOCK_SIZE
            scale = tl.load(key_scales + place, mask=inside, other=0.0)
        # What is read next is found one tile ahead: its address waits for a load.
        block = _block(table, start + TILE, end, BLOCK_SIZE, TILE)
        products = tl.dot(key, tl.trans(query), input_precision=PRECISION)
        weighted = (products + tl.abs(products)) * weight[None, :]
        score = tl.sum(weighted.reshape(TILE, BLOCK_Q, HEADS), axis=2) * scale[:, None]
        written = inside[:, None] & is_token[None, :]
        tl.store(to[None, :] + position[:, None], score, mask=written)


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
    def of(cls, q: Tensor, pages: IndexPages, metadata: AttentionMetadata, tokens: int) -> _Plan:
        num_reqs, query_len = metadata.seq_lens.shape[0], metadata.uniform_query_len
        if query_len > _BLOCK_Q or metadata.fixed_order:  # one size of tiles in fixed order
            query_len = 0
        block_q = triton.next_power_of_2(query_len) if query_len else _BLOCK_Q
        num_tiles = num_reqs if query_len else triton.cdiv(len(q), block_q) + num_reqs
        room = metadata.block_tables.shape[1] * pages.keys.shape[1]
        num_parts = triton.cdiv(min(metadata.max_seq_len // tokens, room), _TILE)
        width = num_parts * _TILE
        at_once = min(num_tiles, max(1, _SCORES_AT_ONCE // (width * block_q)))
        free = num_programs(q.device, _PROGRAMS_PER_SM) // at_once
        splits = max(min(num_parts, free), 1)
        return cls(query_len, block_q, num_tiles, at_once, width, splits)


def copies_ahead(q: Tensor, pages: IndexPages) -> bool:
    """Returns whether `index_scores_ahead_kernel` scores: on Hopper, of e4m3 keys of DeepSeek's
    size."""
    is_known = pages.scales is not None and q.shape[2] == 128 and q.shape[1] <= 64
    return is_known and has_warpgroup_mma(q.device)


def index_topk(
    q: Tensor,
    head_weights: Tensor,
    pages: IndexPages,
    metadata: AttentionMetadata,
    top_k: int,
    tokens: int = 1,
) -> Tensor:
    """See `reference.index.index_topk`."""
    plan = _Plan.of(q, pages, metadata, tokens)
    chosen = torch.empty((len(q), top_k), dtype=torch.int32, device=q.device)
    rows = plan.at_once * plan.block_q
    scores = torch.empty((rows, plan.width), dtype=torch.float32, device=q.device)
    bounds, seq_lens = metadata.query_start_loc, metadata.seq_lens
    shape = {
        "NUM_HEADS": q.shape[1],
        "HEADS": max(16, triton.next_power_of_2(q.shape[1])),
        "D": q.shape[2],
        "TOP_K": top_k,
        "BLOCK_SIZE": pages.keys.shape[1],
        "TILE": _TILE,
        "QUERY_LEN": plan.query_len,
        "BLOCK_Q": plan.block_q,
        "TOKENS": tokens,
        "num_warps": 4,
    }
    if is_ahead := copies_ahead(q, pages):
        shape["STAGES"] = STAGES_AHEAD
    else:
        shape["PRECISION"] = "ieee" if pages.scales is None else "tf32"
        shape["FP8"] = pages.scales is not None
        shape["num_stages"] = 4 if pages.scales is not None else 1
    kernel = index_scores_ahead_kernel if is_ahead else index_scores_kernel
    for first in range(0, plan.num_tiles, plan.at_once):
        count = min(plan.at_once, plan.num_tiles - first)
        kernel[(count, plan.splits)](
            q,
            head_weights,
            pages.keys,
            pages.scales,
            metadata.block_tables,
            bounds,
            seq_lens,
            scores,
            first,
            len(seq_lens),
            plan.width,
            pages.keys.stride(0),
            0 if pages.scales is None else pages.scales.stride(0),
            metadata.block_tables.stride(0),
            **shape,
        )
        given = bounds, seq_lens, first, count, plan.query_len, plan.block_q, plan.width, tokens
        select(scores, SelectedRows(*given), chosen)
    return chosen
