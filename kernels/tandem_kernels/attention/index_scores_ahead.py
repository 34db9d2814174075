"""Index scores of a chunk's tokens on Hopper: halves of a tile's tokens are multiplied in turns.

    copies      keys i + 2            | keys i + 3
    products    tokens 2, 3 x keys i  | tokens 0, 1 x keys i + 1 | tokens 2, 3 x keys i + 1
    sums        tokens 0, 1 x keys i  | tokens 2, 3 x keys i     | tokens 0, 1 x keys i + 1

What weights and sums of heads cost is half of what their products do, so neither may wait for the
other. Writes what `index_topk.index_scores_kernel` does, bit for bit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tandem_kernels.attention.query_tiles import request_of_tile

_copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Has another name from Triton 3.9 on."""


@gluon.jit
def _block(
    table: gl.tensor, start: gl.tensor, end: gl.tensor, lane: gl.tensor, BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Returns the block of each key of a tile, or of all of them."""
    if BLOCK_SIZE % TILE == 0:
        found = gl.load(table + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        position = start + lane
        found = gl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)
    return found.to(gl.int64)


@gluon.jit
def _offset(
    start: gl.tensor, lane: gl.tensor, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr
) -> gl.tensor:
    """Returns where in its block each key of a tile is."""
    return start % BLOCK_SIZE + lane if BLOCK_SIZE % TILE == 0 else (start + lane) % BLOCK_SIZE


@gluon.jit
def _write(
    products: gl.tensor, weight: gl.tensor, scale: gl.tensor, to: gl.tensor, start: gl.tensor,
    end: gl.tensor, num_tokens: gl.tensor, width: gl.tensor, TILE: gl.constexpr,
    TOKENS: gl.constexpr, HEADS: gl.constexpr,
) -> None:  # fmt: skip
    """Adds up the heads of a tile's TOKENS and writes scores. `weight` has the half of weights:
    x + |x| takes half the time of the larger of x and zero, and is twice as much."""
    weighted = (products + gl.abs(products)) * weight[None, :]
    sums = gl.sum(weighted.reshape([TILE, TOKENS, HEADS]), axis=2)
    of_keys: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    position = start + gl.arange(0, TILE, of_keys)
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, sums.type.layout))
    sums = sums * gl.convert_layout(scale, of_keys)[:, None]
    written = (position < end)[:, None] & (token < num_tokens)[None, :]
    gl.store(to + token.to(gl.int64)[None, :] * width + position[:, None], sums, mask=written)


@gluon.jit(do_not_specialize=["first_tile", "num_reqs"])
def index_scores_ahead_kernel(
    q: gl.tensor,
    head_weights: gl.tensor,
    keys: gl.tensor,
    key_scales: gl.tensor,
    block_tables: gl.tensor,
    query_start_loc: gl.tensor,
    seq_lens: gl.tensor,
    scores: gl.tensor,
    first_tile: gl.tensor,
    num_reqs: gl.tensor,
    width: gl.tensor,
    key_block_stride: gl.tensor,
    scale_block_stride: gl.tensor,
    table_stride: gl.tensor,
    NUM_HEADS: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, TOP_K: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, QUERY_LEN: gl.constexpr, BLOCK_Q: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
) -> None:  # fmt: skip
    """Scores, in program (i, s), part s of the context for the tokens of tile i."""
    HALVES: gl.constexpr = 2 if BLOCK_Q > 1 else 1
    HALF: gl.constexpr = BLOCK_Q // HALVES
    ROWS: gl.constexpr = HALF * HEADS
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [num_warps, 1], [1, 0])
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, ROWS, 32])
    local = gl.program_id(0)
    r, query_start, first_token = request_of_tile(
        query_start_loc, first_tile + local, num_reqs, QUERY_LEN, BLOCK_Q
    )
    num_tokens = gl.load(query_start_loc + r + 1) - query_start
    seq_len = gl.load(seq_lens + r)
    last_token = gl.minimum(first_token + BLOCK_Q, num_tokens)
    needed = (seq_len - num_tokens + last_token) // TOKENS
    if (first_token >= num_tokens) | (needed <= TOP_K):
        return
    kind: gl.constexpr = q.dtype.element_ty
    memory: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], kind)
    dim = gl.arange(0, D, gl.SliceLayout(0, COPY))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
    left = last_token - first_token
    of_tile = (query_start + first_token).to(gl.int64) * NUM_HEADS
    at = of_tile + row // HEADS * NUM_HEADS + row % HEADS
    real = row % HEADS < NUM_HEADS
    mask = real & (row // HEADS < left)
    first_query = gl.load(q + at[:, None] * D + dim[None, :], mask=mask[:, None], other=0.0)
    first_query = gl.allocate_shared_memory(kind, [ROWS, D], memory, first_query)
    if HALVES > 1:
        mask = real & (row // HEADS + HALF < left)
        at += HALF * NUM_HEADS
        last_query = gl.load(q + at[:, None] * D + dim[None, :], mask=mask[:, None], other=0.0)
        last_query = gl.allocate_shared_memory(kind, [ROWS, D], memory, last_query)
    column = gl.arange(0, ROWS, gl.SliceLayout(0, PRODUCTS))
    at = of_tile + column // HEADS * NUM_HEADS + column % HEADS
    real = column % HEADS < NUM_HEADS
    mask = real & (column // HEADS < left)
    first_weight = gl.load(head_weights + at, mask=mask, other=0.0) * 0.5
    if HALVES > 1:
        mask = real & (column // HEADS + HALF < left)
        last_weight = gl.load(head_weights + at + HALF * NUM_HEADS, mask=mask, other=0.0) * 0.5

    table = block_tables + r.to(gl.int64) * table_stride
    part = gl.cdiv(gl.cdiv(needed, TILE), gl.num_programs(1)) * TILE
    first = gl.program_id(1) * part
    end = gl.minimum(first + part, needed)
    kept: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, D], kind)
    ring = gl.allocate_shared_memory(kind, [STAGES, TILE, D], kept)
    lane = gl.arange(0, TILE, gl.SliceLayout(1, COPY))
    key = gl.arange(0, TILE, gl.SliceLayout(1, PRODUCTS))
    for stage in gl.static_range(STAGES - 1):
        start = first + stage * TILE
        block = _block(table, start, end, lane, BLOCK_SIZE, TILE) * key_block_stride
        place = block + _offset(start, lane, BLOCK_SIZE, TILE) * D
        _copy_to_shared(ring.index(stage), keys + place[:, None] + dim[None, :])
        async_copy.commit_group()
    block = _block(table, first + (STAGES - 1) * TILE, end, lane, BLOCK_SIZE, TILE)
    place = _block(table, first, end, key, BLOCK_SIZE, TILE) * scale_block_stride
    scale = gl.load(key_scales + place + _offset(first, key, BLOCK_SIZE, TILE))
    next_scales = _block(table, first + TILE, end, key, BLOCK_SIZE, TILE)
    to = scores + (local * BLOCK_Q).to(gl.int64) * width
    last_to = to + HALF * width.to(gl.int64)
    none = gl.zeros([TILE, ROWS], gl.float32, PRODUCTS)
    async_copy.wait_group(STAGES - 2)
    fence_async_shared()
    now = 0
    for start in range(first, end, TILE):
        tile = ring.index(now)
        products = warpgroup_mma(
            tile, first_query.permute((1, 0)), none, use_acc=False, is_async=True
        )
        if HALVES > 1:
            others = warpgroup_mma(
                tile, last_query.permute((1, 0)), none, use_acc=False, is_async=True
            )
        # The tile in front has been multiplied: its memory is free.
        ahead = start + (STAGES - 1) * TILE
        of_keys = block * key_block_stride + _offset(ahead, lane, BLOCK_SIZE, TILE) * D
        free = gl.where(now == 0, STAGES - 1, now - 1)
        _copy_to_shared(ring.index(free), keys + of_keys[:, None] + dim[None, :])
        async_copy.commit_group()
        block = _block(table, ahead + TILE, end, lane, BLOCK_SIZE, TILE)
        of_scales = next_scales * scale_block_stride + _offset(start + TILE, key, BLOCK_SIZE, TILE)
        next_scale = gl.load(key_scales + of_scales)
        next_scales = _block(table, start + 2 * TILE, end, key, BLOCK_SIZE, TILE)
        products = warpgroup_mma_wait(HALVES - 1, deps=(products,))
        _write(
            products, first_weight, scale, to, start, end, left, width, TILE, HALF, HEADS
        )  # fmt: skip
        if HALVES > 1:
            others = warpgroup_mma_wait(0, deps=(others,))
            _write(
                others, last_weight, scale, last_to, start, end, left - HALF, width, TILE, HALF,
                HEADS,
            )  # fmt: skip
        scale = next_scale
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        now = gl.where(now == STAGES - 1, 0, now + 1)
    async_copy.wait_group(0)
