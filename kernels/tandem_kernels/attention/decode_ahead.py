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
from tandem_kernels.attention.head_planes import planes_of_head
from tandem_kernels.attention.soft_cap import soft_capped


@triton.jit
def ask_ahead(
    kv_cache: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    ends: tl.tensor,
    here: tl.tensor,
    length: tl.tensor,
    step: tl.tensor,
    block_stride: tl.tensor,
    value_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Loads the keys [TILE, BLOCK_DIM] and values [TILE, BLOCK_VALUE] of the tile at `here`, but
    for the newest position's; returns also which those are, where the newest key and value are,
    and whether they are in this tile."""
    r, begin = find(ends, here)
    exists = here < length
    seq_len = tl.load(seq_lens + r, mask=exists, other=0)
    first = skipped(seq_len, TILE, WINDOW)
    tiles = tl.maximum(tl.cdiv(seq_len, TILE) - first, 1)
    stretch = tl.cdiv(tiles, step) * step
    head = (here - begin) // stretch
    start = (first + (here - begin) % stretch) * TILE
    dim, value_dim = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    position = start + tl.arange(0, TILE)
    newest = seq_len - 1
    older = position < newest
    if WINDOW > 0:
        older &= position >= seq_len - WINDOW
    table = block_tables + r.to(tl.int64) * table_stride
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + start // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        offset = start % BLOCK_SIZE + tl.arange(0, TILE)
        own_block = block
    else:
        block = tl.load(table + position // BLOCK_SIZE, mask=older, other=0).to(tl.int64)
        offset = position % BLOCK_SIZE
        own_block = tl.load(table + newest // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    keys_at, values_at = planes_of_head(
        kv_cache, head, head_stride, value_stride, HEAD_DIM, VALUE_DIM
    )
    place = block * block_stride + offset * HEAD_DIM
    real = older[:, None] & (dim < HEAD_DIM)[None, :]
    keys = tl.load(keys_at + place[:, None] + dim[None, :], mask=real, other=0.0)
    place = block * block_stride + offset * VALUE_DIM
    real = older[:, None] & (value_dim < VALUE_DIM)[None, :]
    values = tl.load(values_at + place[:, None] + value_dim[None, :], mask=real, other=0.0)
    own = keys_at + own_block * block_stride + newest % BLOCK_SIZE * HEAD_DIM + dim
    own_value = values_at + own_block * block_stride + newest % BLOCK_SIZE * VALUE_DIM + value_dim
    has_newest = exists & (start <= newest) & (newest < start + TILE)
    return keys, values, older, own, own_value, has_newest


@triton.jit
def attend_ahead(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    older: tl.tensor,
    own: tl.tensor,
    own_value: tl.tensor,
    has_newest: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    ABSENT: tl.constexpr,
) -> tl.tensor:
    """Returns the softmax state of `q` over positions that were asked for ahead and the newest,
    whose key is at `own`. ABSENT: the score of the newest if it is elsewhere."""
    known = has_newest & (tl.arange(0, BLOCK_DIM) < HEAD_DIM)
    own_key = tl.load(own, mask=known, other=0.0)
    known = has_newest & (tl.arange(0, BLOCK_VALUE) < VALUE_DIM)
    newest_value = tl.load(own_value, mask=known, other=0.0).to(tl.float32)
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
    acc = own_weight[:, None] * newest_value[None, :]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return peak, total, acc
