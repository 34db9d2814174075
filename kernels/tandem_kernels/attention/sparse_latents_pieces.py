"""Attends to chosen latents on Hopper, 64 heads at once: a tile comes and goes by pieces.

    products    scores 0 | 1 | 2 | 3 |    weights    | values 0 | 1 | 2 | 3 | scores 0' | 1' ..
    copies      .. 2     | 3                                    | 0'| 1'| 2'| 3'

Rows lie anywhere, so nothing but copies of 16 bytes brings them, and what those of a tile take is
more than what its products take. There is memory for one tile. So it is cut across: a piece has a
quarter of the numbers of all rows, its memory is free once their part of the values has been
multiplied, and the next tile's scores begin with the first piece that is there. Weights lie where
the tile had keys on their way to those who multiply with them.
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

from tandem_kernels.attention.chosen_slots import part_of_chosen
from tandem_kernels.attention.latent_tiles import folded, row_weights

_copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Has another name from Triton 3.9 on."""
PIECES = gl.constexpr(4)


@gluon.jit
def _slots(
    slots: gl.tensor, start: gl.tensor, end: gl.tensor, spare: gl.tensor, TILE: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Returns where the rows of a tile lie; behind the last one, `spare`: what is read there counts
    for nothing, but must be numbers."""
    lane = start + gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
    return gl.load(slots + lane, mask=lane < end, other=spare)


@gluon.jit
def _copy(
    kv_cache: gl.tensor, to: gl.shared_memory_descriptor, slot: gl.tensor, first: gl.constexpr,
    ROW: gl.constexpr, block_stride: gl.tensor, BLOCK_SIZE: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> None:  # fmt: skip
    """Begins to copy numbers from `first` on of the rows at `slot`."""
    line = (slot // BLOCK_SIZE).to(gl.int64) * block_stride + slot % BLOCK_SIZE * ROW
    dim = first + gl.arange(0, to.shape[1], gl.SliceLayout(0, LAYOUT))
    _copy_to_shared(to, kv_cache + line[:, None] + dim[None, :])


@gluon.jit
def _store_queries(
    rows: gl.tensor, first_head: gl.tensor, head_stride: gl.tensor, NUM_HEADS: gl.constexpr,
    to: gl.shared_memory_descriptor, LAYOUT: gl.constexpr,
) -> None:  # fmt: skip
    """Loads a part of the heads of a tile; `rows`: pointer to it in the token's first head."""
    head = first_head + gl.arange(0, to.shape[0], gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, to.shape[1], gl.SliceLayout(0, LAYOUT))
    place = rows + head[:, None] * head_stride + dim[None, :]
    to.store(gl.load(place, mask=(head < NUM_HEADS)[:, None], other=0.0))


@gluon.jit
def _scores(
    queries: gl.shared_memory_descriptor, rotated: gl.shared_memory_descriptor,
    latents: gl.shared_memory_descriptor, keys: gl.shared_memory_descriptor, none: gl.tensor,
) -> gl.tensor:  # fmt: skip
    """Multiplies queries with each piece of a tile as soon as it is there: keys are with the
    first."""
    async_copy.wait_group(PIECES - 1)
    fence_async_shared()
    scores = warpgroup_mma(rotated, keys.permute((1, 0)), none, use_acc=False, is_async=True)
    for piece in gl.static_range(PIECES):
        if piece > 0:
            async_copy.wait_group(PIECES - 1 - piece)
            fence_async_shared()
        part = latents.index(piece).permute((1, 0))
        scores = warpgroup_mma(queries.index(piece), part, scores, is_async=True)
    return warpgroup_mma_wait(0, deps=(scores,))


@gluon.jit
def _write(
    out: gl.tensor, line: gl.tensor, real: gl.tensor, sums: gl.tensor, factor: gl.tensor,
    first: gl.constexpr, SPLITS: gl.constexpr, WRITTEN: gl.constexpr,
) -> None:  # fmt: skip
    """Writes a piece of the heads of a tile, which begin at `line`."""
    if SPLITS == 1:
        sums *= factor[:, None]
    attended = gl.convert_layout(sums.to(out.dtype.element_ty), WRITTEN)
    dim = first + gl.arange(0, sums.shape[1], gl.SliceLayout(0, WRITTEN))
    gl.store(out + line[:, None] + dim[None, :], attended, mask=real[:, None])


@gluon.jit(do_not_specialize=["num_reqs"])
def sparse_pieces_kernel(
    q_latent: gl.tensor,
    q_rope: gl.tensor,
    kv_cache: gl.tensor,
    slots: gl.tensor,
    query_start_loc: gl.tensor,
    seq_lens: gl.tensor,
    out: gl.tensor,
    state: gl.tensor,
    num_reqs: gl.tensor,
    latent_token_stride: gl.tensor,
    latent_head_stride: gl.tensor,
    rope_token_stride: gl.tensor,
    rope_head_stride: gl.tensor,
    block_stride: gl.tensor,
    scale: gl.tensor,
    TOP_K: gl.constexpr, QUERY_LEN: gl.constexpr, NUM_HEADS: gl.constexpr, ROWS: gl.constexpr,
    LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
    SPLITS: gl.constexpr, TILES: gl.constexpr, num_warps: gl.constexpr,
) -> None:  # fmt: skip
    """Walks, in program (i, s), part s of what a token attends to, for one of its TILES tiles of
    heads. Writes what `sparse_latent_kernel` does."""
    WIDTH: gl.constexpr = LATENT // PIECES
    ROW: gl.constexpr = LATENT + ROPE
    BY_16: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    BY_8: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, 64, 16])
    SHARE: gl.constexpr = gl.DotOperandLayout(0, PRODUCTS, 2)
    kind: gl.constexpr = kv_cache.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], kind)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, ROPE], kind)
    token, split = gl.program_id(0) // TILES, gl.program_id(1)
    first_head = gl.program_id(0) % TILES * ROWS
    first, end = part_of_chosen(
        query_start_loc, seq_lens, token, split, num_reqs, QUERY_LEN, TOP_K, TILE, SPLITS
    )
    at = token.to(gl.int64)
    latents = gl.allocate_shared_memory(kind, [PIECES, TILE, WIDTH], wide)
    keys = gl.allocate_shared_memory(kind, [TILE, ROPE], narrow)
    shares = keys._reinterpret(kind, [ROWS, TILE], wide)
    places = slots + at * TOP_K
    spare = gl.load(places)
    slot = _slots(places, first, end, spare, TILE, BY_16)
    key_slot = _slots(places, first, end, spare, TILE, BY_8)
    # Nothing is on its way where no loop waits for it: the memory is taken for what is written.
    if first < end:
        _copy(kv_cache, keys, key_slot, LATENT, ROW, block_stride, BLOCK_SIZE, BY_8)
        for piece in gl.static_range(PIECES):
            part = latents.index(piece)
            _copy(kv_cache, part, slot, piece * WIDTH, ROW, block_stride, BLOCK_SIZE, BY_16)
            async_copy.commit_group()
    slot = _slots(places, first + TILE, end, spare, TILE, BY_16)
    key_slot = _slots(places, first + TILE, end, spare, TILE, BY_8)
    queries = gl.allocate_shared_memory(kind, [PIECES, ROWS, WIDTH], wide)
    rotated = gl.allocate_shared_memory(kind, [ROWS, ROPE], narrow)
    own = q_latent + at * latent_token_stride
    for piece in gl.static_range(PIECES):
        _store_queries(
            own + piece * WIDTH, first_head, latent_head_stride, NUM_HEADS, queries.index(piece),
            BY_16,
        )  # fmt: skip
    own = q_rope + at * rope_token_stride
    _store_queries(own, first_head, rope_head_stride, NUM_HEADS, rotated, BY_8)
    lane = gl.arange(0, TILE, gl.SliceLayout(0, PRODUCTS))
    peak = gl.full([ROWS], -3.0e38, gl.float32, gl.SliceLayout(1, PRODUCTS))
    none = gl.zeros([ROWS, TILE], gl.float32, PRODUCTS)
    summed = folded(none)
    sums_0 = gl.zeros([ROWS, WIDTH], gl.float32, PRODUCTS)
    sums_1, sums_2, sums_3 = sums_0, sums_0, sums_0
    for start in range(first, end, TILE):
        scores = _scores(queries, rotated, latents, keys, none)
        inside = (start + lane < end)[None, :]
        weights, peak, summed, shrink = row_weights(scores, inside, scale, peak, summed)
        # What the tile had of keys has been multiplied.
        shares.store(weights.to(kind))
        share = shares.load(SHARE)
        sums_0 = warpgroup_mma(share, latents.index(0), sums_0 * shrink[:, None], is_async=True)
        sums_1 = warpgroup_mma(share, latents.index(1), sums_1 * shrink[:, None], is_async=True)
        sums_2 = warpgroup_mma(share, latents.index(2), sums_2 * shrink[:, None], is_async=True)
        sums_3 = warpgroup_mma(share, latents.index(3), sums_3 * shrink[:, None], is_async=True)
        more = start + TILE < end
        sums_0 = warpgroup_mma_wait(3, deps=(sums_0,))
        if more:
            _copy(kv_cache, keys, key_slot, LATENT, ROW, block_stride, BLOCK_SIZE, BY_8)
            _copy(kv_cache, latents.index(0), slot, 0, ROW, block_stride, BLOCK_SIZE, BY_16)
            async_copy.commit_group()
        sums_1 = warpgroup_mma_wait(2, deps=(sums_1,))
        if more:
            _copy(kv_cache, latents.index(1), slot, WIDTH, ROW, block_stride, BLOCK_SIZE, BY_16)
            async_copy.commit_group()
        sums_2 = warpgroup_mma_wait(1, deps=(sums_2,))
        if more:
            _copy(kv_cache, latents.index(2), slot, 2 * WIDTH, ROW, block_stride, BLOCK_SIZE, BY_16)
            async_copy.commit_group()
        sums_3 = warpgroup_mma_wait(0, deps=(sums_3,))
        if more:
            _copy(kv_cache, latents.index(3), slot, 3 * WIDTH, ROW, block_stride, BLOCK_SIZE, BY_16)
            async_copy.commit_group()
        slot = _slots(places, start + 2 * TILE, end, spare, TILE, BY_16)
        key_slot = _slots(places, start + 2 * TILE, end, spare, TILE, BY_8)
    total = gl.convert_layout(gl.sum(gl.sum(summed, axis=2), axis=1), peak.type.layout)
    if SPLITS > 1:
        own_head = first_head + gl.arange(0, ROWS, peak.type.layout)
        index = (at * NUM_HEADS + own_head) * SPLITS + split
        gl.store(state + index * 2, peak, mask=own_head < NUM_HEADS)
        gl.store(state + index * 2 + 1, total, mask=own_head < NUM_HEADS)
    factor = 1.0 / gl.where(total > 0.0, total, 1.0)
    head = first_head + gl.arange(0, ROWS, gl.SliceLayout(1, BY_16))
    line = ((at * NUM_HEADS + head) * SPLITS + split) * LATENT
    real = head < NUM_HEADS
    _write(out, line, real, sums_0, factor, 0, SPLITS, BY_16)
    _write(out, line, real, sums_1, factor, WIDTH, SPLITS, BY_16)
    _write(out, line, real, sums_2, factor, 2 * WIDTH, SPLITS, BY_16)
    _write(out, line, real, sums_3, factor, 3 * WIDTH, SPLITS, BY_16)
