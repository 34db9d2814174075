"""The first tile of a run of `decode_attention`, on its way before the kernel in front has ended.

With few requests a run is a tile or two, and what a program waits for is memory that answers. All
but the newest position were written in earlier steps, so they depend on nothing, as in
`window_attention`:

    before the wait    lengths ─▶ place in the line ─▶ block ─▶ keys, values of the tile
    behind it          query; key and value of the newest position, if the tile has it
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.attention.decode_line import find, skipped
from tandem_kernels.attention.soft_cap import soft_capped


@triton.jit
def ask_ahead(
    kv_cache: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    ends: tl.tensor,
    here: tl.tensor,
    length: tl.tensor,
    block_stride: tl.tensor,
    value_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Loads the keys and values [TILE, BLOCK_DIM] of the tile at `here`, but for the newest
    position's; returns also which those are, and where the newest is, or None: elsewhere."""
    r, begin = find(ends, here)
    exists = here < length
    seq_len = tl.load(seq_lens + r, mask=exists, other=0)
    first = skipped(seq_len, TILE, WINDOW)
    tiles = tl.maximum(tl.cdiv(seq_len, TILE) - first, 1)
    head = (here - begin) // tiles
    start = (first + (here - begin) % tiles) * TILE
    dim = tl.arange(0, BLOCK_DIM)
    position = start + tl.arange(0, TILE)
    newest = seq_len - 1
    older = position < newest
    if WINDOW > 0:
        older &= position >= seq_len - WINDOW
    table = block_tables + r.to(tl.int64) * table_stride
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + start // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        place = block * block_stride + (start % BLOCK_SIZE + tl.arange(0, TILE)) * HEAD_DIM
        own = block * block_stride + newest % BLOCK_SIZE * HEAD_DIM
    else:
        block = tl.load(table + position // BLOCK_SIZE, mask=older, other=0).to(tl.int64)
        place = block * block_stride + position % BLOCK_SIZE * HEAD_DIM
        own_block = tl.load(table + newest // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        own = own_block * block_stride + newest % BLOCK_SIZE * HEAD_DIM
    of_head = kv_cache + head.to(tl.int64) * head_stride
    real = older[:, None] & (dim < HEAD_DIM)[None, :]
    keys = tl.load(of_head + place[:, None] + dim[None, :], mask=real, other=0.0)
    values = tl.load(of_head + value_stride + place[:, None] + dim[None, :], mask=real, other=0.0)
    has_newest = exists & (start <= newest) & (newest < start + TILE)
    return keys, values, older, of_head + own + dim, has_newest


@triton.jit
def attend_ahead(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    older: tl.tensor,
    own: tl.tensor,
    has_newest: tl.tensor,
    value_stride: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    ABSENT: tl.constexpr,
) -> tl.tensor:
    """Returns the softmax state of `q` over positions that were asked for ahead and the newest, at
    `own`. ABSENT: the score of the newest if it is elsewhere."""
    known = has_newest & (tl.arange(0, BLOCK_DIM) < HEAD_DIM)
    own_key = tl.load(own, mask=known, other=0.0)
    own_value = tl.load(own + value_stride, mask=known, other=0.0).to(tl.float32)
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    own_score = tl.sum(q.to(tl.float32) * own_key.to(tl.float32)[None, :], axis=1)
    if CAPPED:
        scores = soft_capped(scores, cap)
        own_score = soft_capped(own_score, cap)
    scores = tl.where(older[None, :], scores * scale, float("-inf"))
    own_score = tl.where(has_newest, own_score * scale, ABSENT)
    peak = tl.maximum(tl.max(scores, axis=1), own_score)
    weights = tl.exp2(scores - peak[:, None])
    own_weight = tl.exp2(own_score - peak)
    total = tl.sum(weights, axis=1) + own_weight
    acc = own_weight[:, None] * own_value[None, :]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return peak, total, acc
