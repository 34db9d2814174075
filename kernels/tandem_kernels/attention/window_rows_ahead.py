"""Attends to windows and rows of many tokens on Hopper while the next tile is on its way.

    copies      tile 1             | tile 2              | query, tile 0 of the next token
    products    scores 0 | values 0 | scores 1 | values 1 | written

What a token attends to is few tiles, so whatever a program does before its first product and behind
its last one would take as long as they do. So a program takes one token after the other, and copies
go on from one to the next: the tile that is asked for behind a token's last one is the first of the
next. Places of a tile are found one tile earlier still, while values are multiplied.
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

from tandem_kernels.attention.chosen_slots import request_of_token, seen_tokens

_copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Has another name from Triton 3.9 on."""
_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _seen(
    query_start_loc: gl.tensor,
    seq_lens: gl.tensor,
    unit: gl.tensor,
    num_reqs: gl.tensor,
    num_tokens: gl.tensor,
    WINDOW: gl.constexpr,
    TOKENS: gl.constexpr,
    TOP_K: gl.constexpr,
    QUERY_LEN: gl.constexpr,
    TILE: gl.constexpr,
    TILES: gl.constexpr,
) -> tuple[gl.tensor, ...]:
    """Returns what a unit's token sees: the token, its request, where its window begins and how
    long it is, how many rows there are, and how many tiles: two at least, of which one may be
    empty. Behind the last unit is the last token again."""
    token = gl.minimum(unit // TILES, num_tokens - 1)
    r = request_of_token(query_start_loc, token, num_reqs, QUERY_LEN)
    context = seen_tokens(query_start_loc, seq_lens, token, r)
    begin = context * 0
    if WINDOW > 0:
        begin = gl.maximum(context - WINDOW, 0)
    rows = context * 0
    if TOKENS > 0:
        rows = context // TOKENS
        if TOP_K > 0:
            rows = gl.minimum(rows, TOP_K)
    tiles = gl.maximum(gl.cdiv(context - begin, TILE) + gl.cdiv(rows, TILE), 2)
    return token, r, begin, context - begin, rows, tiles


@gluon.jit
def _places(
    pages: gl.tensor,
    block_tables: gl.tensor,
    row_pages: gl.tensor,
    row_tables: gl.tensor,
    chosen: gl.tensor,
    token: gl.tensor,
    r: gl.tensor,
    begin: gl.tensor,
    length: gl.tensor,
    rows: gl.tensor,
    tile: gl.tensor,
    lane: gl.tensor,
    block_stride: gl.tensor,
    table_stride: gl.tensor,
    row_block_stride: gl.tensor,
    row_table_stride: gl.tensor,
    TOP_K: gl.constexpr,
    LATENT: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROW_BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Returns where the vectors of a token's tile lie, and how many there are."""
    of_window = gl.cdiv(length, TILE)
    if tile < of_window:
        count = length - tile * TILE
        position = begin + tile * TILE + lane
        table = block_tables + r.to(gl.int64) * table_stride
        block = gl.load(table + position // BLOCK_SIZE, mask=lane < count, other=0).to(gl.int64)
        place = pages + (block * block_stride + position % BLOCK_SIZE * LATENT)
    else:
        first = (tile - of_window) * TILE
        count = rows - first
        number = first + lane
        if TOP_K > 0:
            own = chosen + token.to(gl.int64) * TOP_K
            number = gl.load(own + number, mask=lane < count, other=0)
        table = row_tables + r.to(gl.int64) * row_table_stride
        block = gl.load(table + number // ROW_BLOCK_SIZE, mask=lane < count, other=0).to(gl.int64)
        place = row_pages + (block * row_block_stride + number % ROW_BLOCK_SIZE * LATENT)
    return place, count


@gluon.jit
def _copy_query(
    q: gl.tensor,
    query: gl.shared_memory_descriptor,
    unit: gl.tensor,
    token: gl.tensor,
    token_stride: gl.tensor,
    NUM_HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    LATENT: gl.constexpr,
    TILES: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> None:
    """Begins to copy the heads of a unit."""
    head = unit % TILES * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, LATENT, gl.SliceLayout(0, LAYOUT))
    place = q + token.to(gl.int64) * token_stride + (head[:, None] * LATENT + dim[None, :])
    _copy_to_shared(query, place, mask=(head < NUM_HEADS)[:, None])
    async_copy.commit_group()


@gluon.jit
def _turn_query(
    query: gl.shared_memory_descriptor,
    of_token: gl.tensor,
    eps: gl.tensor,
    ROWS: gl.constexpr,
    LATENT: gl.constexpr,
    ROPE: gl.constexpr,
    LAYOUT: gl.constexpr,
    TURNED: gl.constexpr,
) -> gl.tensor:
    """Rotates the last numbers of a unit's heads, by the angles `of_token` and on, and returns what
    all of a head's numbers are to be multiplied by: its norm."""
    whole = query.load(LAYOUT).to(gl.float32)
    length = gl.sqrt_rn(gl.sum(whole * whole, axis=1) / LATENT + eps)
    last = query.slice(LATENT - ROPE, ROPE, dim=1)
    even, odd = gl.split(last.load(TURNED).to(gl.float32).reshape([ROWS, ROPE // 2, 2]))
    pair = gl.arange(0, ROPE // 2, gl.SliceLayout(0, even.type.layout))
    cos = gl.load(of_token + pair)[None, :]
    sin = gl.load(of_token + ROPE // 2 + pair)[None, :]
    turned = gl.join(even * cos - odd * sin, odd * cos + even * sin).reshape([ROWS, ROPE])
    last.store(gl.convert_layout(turned.to(query.dtype), TURNED))
    return 1.0 / length


@gluon.jit
def _copy_tile(
    tile: gl.shared_memory_descriptor,
    place: gl.tensor,
    count: gl.tensor,
    lane: gl.tensor,
    dim: gl.tensor,
) -> None:
    """Begins to copy a tile; vectors that there are not are zeros."""
    _copy_to_shared(tile, place[:, None] + dim[None, :], mask=(lane < count)[:, None])
    async_copy.commit_group()


@gluon.jit
def _write(
    out: gl.tensor,
    unit: gl.tensor,
    token: gl.tensor,
    attended: gl.tensor,
    NUM_HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    LATENT: gl.constexpr,
    TILES: gl.constexpr,
) -> None:
    """Writes the heads of a unit."""
    # What a warp has of the sums, in pieces of 16 bytes.
    WRITTEN: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [0, 128], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, 256]],
        [],
        [64, 512],
    )
    head = unit % TILES * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WRITTEN))
    dim = gl.arange(0, LATENT, gl.SliceLayout(0, WRITTEN))
    to = out + (token.to(gl.int64) * NUM_HEADS + head)[:, None] * LATENT + dim[None, :]
    found = gl.convert_layout(attended.to(out.dtype.element_ty), WRITTEN)
    gl.store(to, found, mask=(head < NUM_HEADS)[:, None])


@gluon.jit(do_not_specialize=["num_reqs", "num_tokens"])
def window_rows_ahead_kernel(
    q: gl.tensor,
    pages: gl.tensor,
    block_tables: gl.tensor,
    row_pages: gl.tensor,
    row_tables: gl.tensor,
    chosen: gl.tensor,
    query_start_loc: gl.tensor,
    seq_lens: gl.tensor,
    sinks: gl.tensor,
    positions: gl.tensor,
    cos_sin_cache: gl.tensor,
    out: gl.tensor,
    num_reqs: gl.tensor,
    num_tokens: gl.tensor,
    token_stride: gl.tensor,
    block_stride: gl.tensor,
    table_stride: gl.tensor,
    row_block_stride: gl.tensor,
    row_table_stride: gl.tensor,
    scale: gl.tensor,
    eps: gl.tensor,
    WINDOW: gl.constexpr, TOKENS: gl.constexpr, TOP_K: gl.constexpr, QUERY_LEN: gl.constexpr,
    NUM_HEADS: gl.constexpr, ROWS: gl.constexpr, LATENT: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    ROW_BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, TILES: gl.constexpr, ROPE: gl.constexpr,
    num_warps: gl.constexpr,
) -> None:  # fmt: skip
    """Walks units p, p + programs and so on in program p; unit u is the tile u % TILES of heads of
    token u // TILES. Writes what `window_rows_kernel` does."""
    LATENTS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    GROUPS: gl.constexpr = num_warps // 4
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, TILE // GROUPS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, LATENT // GROUPS, 16])
    TURNED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    kind: gl.constexpr = pages.dtype.element_ty
    lane = gl.arange(0, TILE, gl.SliceLayout(1, LATENTS))
    of_scores = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    dim = gl.arange(0, LATENT, gl.SliceLayout(0, LATENTS))
    memory: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, LATENT], kind)
    query = gl.allocate_shared_memory(kind, [ROWS, LATENT], memory)
    vectors = gl.allocate_shared_memory(kind, [2, TILE, LATENT], memory)
    num_units = num_tokens * TILES
    token, r, begin, length, rows, tiles = _seen(
        query_start_loc, seq_lens, gl.program_id(0), num_reqs, num_tokens,
        WINDOW, TOKENS, TOP_K, QUERY_LEN, TILE, TILES,
    )  # fmt: skip
    place, count = _places(
        pages, block_tables, row_pages, row_tables, chosen, token, r, begin, length, rows, 0,
        lane, block_stride, table_stride, row_block_stride, row_table_stride,
        TOP_K, LATENT, BLOCK_SIZE, ROW_BLOCK_SIZE, TILE,
    )  # fmt: skip
    _copy_query(
        q, query, gl.program_id(0), token, token_stride, NUM_HEADS, ROWS, LATENT, TILES, LATENTS
    )
    _copy_tile(vectors.index(0), place, count, lane, dim)
    next_place, next_count = _places(
        pages, block_tables, row_pages, row_tables, chosen, token, r, begin, length, rows, 1,
        lane, block_stride, table_stride, row_block_stride, row_table_stride,
        TOP_K, LATENT, BLOCK_SIZE, ROW_BLOCK_SIZE, TILE,
    )  # fmt: skip
    none = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    now = 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        head = unit % TILES * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        peak = gl.load(sinks + head, mask=head < NUM_HEADS, other=0.0) * _LOG2_E
        # The sink is one more key, of weight 1 while nothing is higher.
        summed = gl.where(of_scores[None, :] == 0, none + 1.0, none)
        shares = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, SCORES)) * scale
        if ROPE > 0:
            async_copy.wait_group(0)
            angles = cos_sin_cache + gl.load(positions + token) * ROPE
            norm = _turn_query(query, angles, eps, ROWS, LATENT, ROPE, LATENTS, TURNED)
            shares *= gl.convert_layout(norm, gl.SliceLayout(1, SCORES))
        acc = gl.zeros([ROWS, LATENT], gl.float32, SUMS)
        next_token, next_r, next_begin, next_length = token, r, begin, length
        next_rows, next_tiles = rows, tiles
        for tile in range(tiles):
            own = vectors.index(now)
            async_copy.wait_group(0)
            fence_async_shared()
            scores = warpgroup_mma(query, own.permute((1, 0)), none, use_acc=False, is_async=True)
            _copy_tile(vectors.index(1 - now), next_place, next_count, lane, dim)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            scores = gl.where((of_scores < count)[None, :], scores * shares[:, None], float("-inf"))
            higher = gl.maximum(peak, gl.max(scores, axis=1))
            shrink = gl.exp2(peak - higher)
            weights = gl.exp2(scores - higher[:, None])
            summed = summed * shrink[:, None] + weights
            peak = higher
            share = gl.convert_layout(weights.to(kind), gl.DotOperandLayout(0, SUMS, 2))
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
            acc = warpgroup_mma(share, own, acc, is_async=True)
            now = 1 - now
            count = next_count
            ahead = tile + 2
            if ahead == tiles:
                next_token, next_r, next_begin, next_length, next_rows, next_tiles = _seen(
                    query_start_loc, seq_lens, unit + gl.num_programs(0), num_reqs, num_tokens,
                    WINDOW, TOKENS, TOP_K, QUERY_LEN, TILE, TILES,
                )  # fmt: skip
            # Until then what follows is the token's own.
            next_place, next_count = _places(
                pages, block_tables, row_pages, row_tables, chosen, next_token, next_r, next_begin,
                next_length, next_rows, gl.where(ahead < tiles, ahead, ahead - tiles), lane,
                block_stride, table_stride, row_block_stride, row_table_stride,
                TOP_K, LATENT, BLOCK_SIZE, ROW_BLOCK_SIZE, TILE,
            )  # fmt: skip
            acc = warpgroup_mma_wait(0, deps=(acc,))
        _copy_query(
            q, query, unit + gl.num_programs(0), next_token, token_stride,
            NUM_HEADS, ROWS, LATENT, TILES, LATENTS,
        )  # fmt: skip
        total = gl.convert_layout(gl.sum(summed, axis=1), gl.SliceLayout(1, SUMS))
        _write(out, unit, token, acc * (1.0 / total)[:, None], NUM_HEADS, ROWS, LATENT, TILES)
        token, r, begin, length = next_token, next_r, next_begin, next_length
        rows, tiles = next_rows, next_tiles
    async_copy.wait_group(0)
