"""Attends to chosen latents on Hopper with few heads: context is on the left of both products.

A matrix unit takes 64 rows on the left and no fewer, which up to 16 heads are not. Rows lie
anywhere, so nothing but copies of 16 bytes brings them, and what those of a tile take is what its
products take: another program on the same SM multiplies meanwhile. Two with one tile each take half
the time of one with two. More heads: `sparse_latents_pieces`.
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
from tandem_kernels.attention.latent_tiles import tile_memory

_copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Has another name from Triton 3.9 on."""


@gluon.jit
def _places(
    slots: gl.tensor, start: gl.tensor, end: gl.tensor, spare: gl.tensor, COUNT: gl.constexpr,
    num_warps: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """Returns where the rows of a tile lie, as copies of latents and as those of keys want it;
    behind the last one, `spare`: what is read there counts for nothing, but must be numbers."""
    LATENTS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    lane = start + gl.arange(0, COUNT, gl.SliceLayout(1, LATENTS))
    of_latents = gl.load(slots + lane, mask=lane < end, other=spare)
    lane = start + gl.arange(0, COUNT, gl.SliceLayout(1, KEYS))
    return of_latents, gl.load(slots + lane, mask=lane < end, other=spare)


@gluon.jit
def _copy(
    kv_cache: gl.tensor, latents: gl.shared_memory_descriptor,
    keys: gl.shared_memory_descriptor, of_latents: gl.tensor, of_keys: gl.tensor,
    block_stride: gl.tensor, BLOCK_SIZE: gl.constexpr, num_warps: gl.constexpr,
) -> None:  # fmt: skip
    """Begins to copy a tile: `of_latents` and `of_keys` are both where its rows lie."""
    LATENT: gl.constexpr = latents.shape[1]
    ROPE: gl.constexpr = keys.shape[1]
    LATENTS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    line = (of_latents // BLOCK_SIZE).to(gl.int64) * block_stride
    line += of_latents % BLOCK_SIZE * (LATENT + ROPE)
    dim = gl.arange(0, LATENT, gl.SliceLayout(0, LATENTS))
    _copy_to_shared(latents, kv_cache + line[:, None] + dim[None, :])
    line = (of_keys // BLOCK_SIZE).to(gl.int64) * block_stride
    line += of_keys % BLOCK_SIZE * (LATENT + ROPE) + LATENT
    dim = gl.arange(0, ROPE, gl.SliceLayout(0, KEYS))
    _copy_to_shared(keys, kv_cache + line[:, None] + dim[None, :])
    async_copy.commit_group()


@gluon.jit
def _queries(
    rows: gl.tensor,
    first_head: gl.tensor,
    NUM_HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    LAYOUT: gl.constexpr,
    head_stride: gl.tensor,
) -> gl.shared_memory_descriptor:
    """Loads the heads of a tile, [ROWS, WIDTH]; `rows`: pointer to the token's first head."""
    head = first_head + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    place = rows + head[:, None] * head_stride + dim[None, :]
    loaded = gl.load(place, mask=(head < NUM_HEADS)[:, None], other=0.0)
    kind: gl.constexpr = rows.dtype.element_ty
    memory: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], kind)
    return gl.allocate_shared_memory(kind, [ROWS, WIDTH], memory, loaded)


@gluon.jit
def _weights(
    scores: gl.tensor, inside: gl.tensor, scale: gl.tensor, peak: gl.tensor, summed: gl.tensor
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Returns what a tile's values count for, the new peaks, sums not yet added up over keys, and
    what all before shrinks by."""
    scores = gl.where(inside[:, None], scores * scale, float("-inf"))
    higher = gl.maximum(peak, gl.max(scores, axis=0))
    shrink = gl.exp2(peak - higher)
    weights = gl.exp2(scores - higher[None, :])
    return weights, higher, summed * shrink[None, :] + weights, shrink


@gluon.jit
def _write(
    out: gl.tensor, state: gl.tensor, rows: gl.tensor, first_head: gl.tensor, split: gl.tensor,
    peak: gl.tensor, total: gl.tensor, acc: gl.tensor, NUM_HEADS: gl.constexpr,
    SPLITS: gl.constexpr, num_warps: gl.constexpr,
) -> None:  # fmt: skip
    """Writes the heads of a tile, of `acc` [latent, heads]; `rows`: the token's first one in
    `out`."""
    LATENT: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    WRITTEN: gl.constexpr = gl.BlockedLayout([8, 1], [32, 1], [num_warps, 1], [0, 1])
    if SPLITS == 1:
        factor = 1.0 / gl.where(total > 0.0, total, 1.0)
        acc *= gl.convert_layout(factor, gl.SliceLayout(0, acc.type.layout))[None, :]
    else:
        head = first_head + gl.arange(0, ROWS, peak.type.layout)
        index = (rows + head) * SPLITS + split
        gl.store(state + index * 2, peak, mask=head < NUM_HEADS)
        gl.store(state + index * 2 + 1, total, mask=head < NUM_HEADS)
    attended = gl.convert_layout(acc.to(out.dtype.element_ty), WRITTEN)
    own = first_head + gl.arange(0, ROWS, gl.SliceLayout(0, WRITTEN))
    dim = gl.arange(0, LATENT, gl.SliceLayout(1, WRITTEN))
    line = ((rows + own) * SPLITS + split) * LATENT
    gl.store(out + line[None, :] + dim[:, None], attended, mask=(own < NUM_HEADS)[None, :])


@gluon.jit(do_not_specialize=["num_reqs"])
def sparse_ahead_kernel(
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
    LATENTS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 16])
    kind: gl.constexpr = kv_cache.dtype.element_ty
    token, split = gl.program_id(0) // TILES, gl.program_id(1)
    first_head = gl.program_id(0) % TILES * ROWS
    first, end = part_of_chosen(
        query_start_loc, seq_lens, token, split, num_reqs, QUERY_LEN, TOP_K, TILE, SPLITS
    )
    at = token.to(gl.int64)
    own = q_latent + at * latent_token_stride
    query = _queries(own, first_head, NUM_HEADS, ROWS, LATENT, LATENTS, latent_head_stride)
    own = q_rope + at * rope_token_stride
    rotated = _queries(own, first_head, NUM_HEADS, ROWS, ROPE, KEYS, rope_head_stride)
    latents = tile_memory(TILE, LATENT, kind)
    keys = tile_memory(TILE, ROPE, kind)
    shares = tile_memory(TILE, ROWS, kind)
    places = slots + at * TOP_K
    spare = gl.load(places)
    lane = gl.arange(0, TILE, gl.SliceLayout(1, PRODUCTS))
    of_latents, of_keys = _places(places, first, end, spare, TILE, num_warps)
    # Nothing is on its way where no loop waits for it: the memory is taken for what is written.
    if first < end:
        _copy(kv_cache, latents, keys, of_latents, of_keys, block_stride, BLOCK_SIZE, num_warps)
    of_latents, of_keys = _places(places, first + TILE, end, spare, TILE, num_warps)
    peak = gl.full([ROWS], -3.0e38, gl.float32, gl.SliceLayout(0, PRODUCTS))
    none = gl.zeros([TILE, ROWS], gl.float32, PRODUCTS)
    summed = none
    acc = gl.zeros([LATENT, ROWS], gl.float32, PRODUCTS)
    for start in range(first, end, TILE):
        async_copy.wait_group(0)
        fence_async_shared()
        turned = query.permute((1, 0))
        scores = warpgroup_mma(latents, turned, none, use_acc=False, is_async=True)
        scores = warpgroup_mma(keys, rotated.permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        weights, peak, summed, shrink = _weights(scores, start + lane < end, scale, peak, summed)
        shares.store(weights.to(kind))
        fence_async_shared()
        acc = acc * shrink[None, :]
        acc = warpgroup_mma(latents.permute((1, 0)), shares, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if start + TILE < end:
            _copy(kv_cache, latents, keys, of_latents, of_keys, block_stride, BLOCK_SIZE, num_warps)
        of_latents, of_keys = _places(places, start + 2 * TILE, end, spare, TILE, num_warps)
    total = gl.sum(summed, axis=0)
    _write(
        out, state, at * NUM_HEADS, first_head, split, peak, total, acc, NUM_HEADS, SPLITS,
        num_warps,
    )  # fmt: skip
