"""Attends to chosen latents on Hopper while the next ones are on their way.

    64 heads    products    scores 0, 1 | values 0 | values 1 | scores 2, 3
                copies                             | 2        | 3
    16 heads    one tile at a time, and another program on the same SM that multiplies meanwhile

Rows lie anywhere, so nothing but copies of 16 bytes brings them, and what those of a tile take is
what its products take. Triton's own loop begins copies behind the products, and has no memory for a
third tile of 64 heads. So this one says itself when they begin: once the values of a tile have been
multiplied. Scores are those of two tiles, for matrix units take as long for 32 columns, which each
half of the warps has of one, as for 64. No product is in flight at the loop's end: the assembler
would then wait for each (`findings/triton_products_in_flight_at_loop_end.sh`).

TURNED, for 16 heads, context is on the left of both products: a matrix unit takes 64 rows there and
no fewer. Two programs with one tile each fit an SM, and take half the time of one with two.
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
def _tiles(
    count: gl.constexpr, rows: gl.constexpr, width: gl.constexpr, kind: gl.constexpr
) -> gl.shared_memory_descriptor:
    """Returns memory for tiles of rows that products read."""
    memory: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, width], kind)
    return gl.allocate_shared_memory(kind, [count, rows, width], memory)


@gluon.jit
def _weights(
    scores: gl.tensor,
    inside: gl.tensor,
    scale: gl.tensor,
    peak: gl.tensor,
    summed: gl.tensor,
    OF_ROW: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Returns what a tile's values count for, the new peaks, sums not yet added up over keys, and
    what all before shrinks by."""
    scores = gl.where(gl.expand_dims(inside, 1 - OF_ROW), scores * scale, float("-inf"))
    higher = gl.maximum(peak, gl.max(scores, axis=OF_ROW))
    shrink = gl.exp2(peak - higher)
    weights = gl.exp2(scores - gl.expand_dims(higher, OF_ROW))
    if OF_ROW == 1:
        added = _folded(weights)
        of_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, added.type.layout))
        summed = summed * gl.convert_layout(shrink, of_rows)[:, None, None] + added
    else:
        summed = summed * gl.expand_dims(shrink, OF_ROW) + weights
    return weights, higher, summed, shrink


@gluon.jit
def _folded(weights: gl.tensor) -> gl.tensor:
    """Adds up what a thread has of a row's keys: eight are side by side in four threads."""
    rows: gl.constexpr = weights.shape[0]
    return gl.sum(weights.reshape([rows, 2, weights.shape[1] // 16, 8]), axis=2)


@gluon.jit
def _write(
    out: gl.tensor,
    state: gl.tensor,
    rows: gl.tensor,
    first_head: gl.tensor,
    split: gl.tensor,
    peak: gl.tensor,
    total: gl.tensor,
    acc: gl.tensor,
    NUM_HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    LATENT: gl.constexpr,
    SPLITS: gl.constexpr,
    OF_ROW: gl.constexpr,
    SUMS: gl.constexpr,
    WRITTEN: gl.constexpr,
) -> None:
    """Writes the heads of a tile; `rows`: the token's first one in `out`."""
    of_sums: gl.constexpr = gl.SliceLayout(OF_ROW, SUMS)
    if SPLITS == 1:
        factor = gl.convert_layout(1.0 / gl.where(total > 0.0, total, 1.0), of_sums)
        acc *= gl.expand_dims(factor, OF_ROW)
    else:
        head = first_head + gl.arange(0, ROWS, peak.type.layout)
        index = (rows + head) * SPLITS + split
        gl.store(state + index * 2, peak, mask=head < NUM_HEADS)
        gl.store(state + index * 2 + 1, total, mask=head < NUM_HEADS)
    attended = gl.convert_layout(acc.to(out.dtype.element_ty), WRITTEN)
    head = first_head + gl.arange(0, ROWS, gl.SliceLayout(OF_ROW, WRITTEN))
    dim = gl.arange(0, LATENT, gl.SliceLayout(1 - OF_ROW, WRITTEN))
    line = gl.expand_dims(((rows + head) * SPLITS + split) * LATENT, OF_ROW)
    real = gl.expand_dims(head < NUM_HEADS, OF_ROW)
    gl.store(out + line + gl.expand_dims(dim, 1 - OF_ROW), attended, mask=real)


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
    SPLITS: gl.constexpr, TURNED: gl.constexpr, TILES: gl.constexpr, num_warps: gl.constexpr,
) -> None:  # fmt: skip
    """Walks, in program (i, s), part s of what a token attends to, for one of its TILES tiles of
    heads. Writes what `sparse_latent_kernel` does."""
    LATENTS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    GROUPS: gl.constexpr = num_warps // 4
    HALVES: gl.constexpr = 1 if TURNED else 2
    HALF: gl.constexpr = TILE // HALVES
    WIDTH: gl.constexpr = (ROWS if TURNED else TILE) // GROUPS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, WIDTH, 16])
    SUMS: gl.constexpr = (
        SCORES if TURNED else gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, 256, 16])
    )
    WRITTEN: gl.constexpr = (
        gl.BlockedLayout([8, 1], [32, 1], [num_warps, 1], [0, 1]) if TURNED else LATENTS
    )
    OF_ROW: gl.constexpr = 0 if TURNED else 1
    kind: gl.constexpr = kv_cache.dtype.element_ty
    token, split = gl.program_id(0) // TILES, gl.program_id(1)
    first_head = gl.program_id(0) % TILES * ROWS
    r = request_of_token(query_start_loc, token, num_reqs, QUERY_LEN)
    needed = gl.minimum(seen_tokens(query_start_loc, seq_lens, token, r), TOP_K)
    part = gl.cdiv(gl.cdiv(needed, TILE), SPLITS) * TILE
    first = split * part
    end = gl.minimum(first + part, needed)
    at = token.to(gl.int64)
    own = q_latent + at * latent_token_stride
    query = _queries(own, first_head, NUM_HEADS, ROWS, LATENT, LATENTS, latent_head_stride)
    own = q_rope + at * rope_token_stride
    rotated = _queries(own, first_head, NUM_HEADS, ROWS, ROPE, KEYS, rope_head_stride)
    latents = _tiles(1, TILE, LATENT, kind).index(0)
    keys = _tiles(1, TILE, ROPE, kind).index(0)
    if TURNED:
        shares = _tiles(1, TILE, ROWS, kind).index(0)
    places = slots + at * TOP_K
    spare = gl.load(places)
    lane = gl.arange(0, TILE, gl.SliceLayout(1 - OF_ROW, SCORES))
    front, key_front = latents.slice(0, HALF), keys.slice(0, HALF)
    of_latents, of_keys = _places(places, first, end, spare, HALF, num_warps)
    # Nothing is on its way where no loop waits for it: the memory is taken for what is written.
    if first < end:
        _copy(kv_cache, front, key_front, of_latents, of_keys, block_stride, BLOCK_SIZE, num_warps)
    of_latents, of_keys = _places(places, first + TILE, end, spare, HALF, num_warps)
    if HALVES > 1:
        back, key_back = latents.slice(HALF, HALF), keys.slice(HALF, HALF)
        last_l, last_k = _places(places, first + HALF, end, spare, HALF, num_warps)
        if first < end:
            _copy(kv_cache, back, key_back, last_l, last_k, block_stride, BLOCK_SIZE, num_warps)
        last_l, last_k = _places(places, first + TILE + HALF, end, spare, HALF, num_warps)
    peak = gl.full([ROWS], -3.0e38, gl.float32, gl.SliceLayout(OF_ROW, SCORES))
    none = gl.zeros([TILE, ROWS] if TURNED else [ROWS, TILE], gl.float32, SCORES)
    summed = none if TURNED else _folded(none)
    acc = gl.zeros([LATENT, ROWS] if TURNED else [ROWS, LATENT], gl.float32, SUMS)
    for start in range(first, end, TILE):
        async_copy.wait_group(0)
        fence_async_shared()
        if TURNED:
            turned = query.permute((1, 0))
            scores = warpgroup_mma(latents, turned, none, use_acc=False, is_async=True)
            scores = warpgroup_mma(keys, rotated.permute((1, 0)), scores, is_async=True)
        else:
            scores = warpgroup_mma(
                query, latents.permute((1, 0)), none, use_acc=False, is_async=True
            )
            scores = warpgroup_mma(rotated, keys.permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        weights, peak, summed, shrink = _weights(
            scores, start + lane < end, scale, peak, summed, OF_ROW
        )
        if TURNED:
            shares.store(weights.to(kind))
            fence_async_shared()
            acc = acc * shrink[None, :]
            acc = warpgroup_mma(latents.permute((1, 0)), shares, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
        else:
            SHARE: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
            pair = gl.convert_layout(weights.to(kind), SHARE).reshape([ROWS, HALVES, HALF])
            share, last = pair.permute((0, 2, 1)).split()
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
            acc = warpgroup_mma(gl.convert_layout(share, SHARE), front, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            acc = warpgroup_mma(gl.convert_layout(last, SHARE), back, acc, is_async=True)
        # Values of this half are multiplied: its memory is free.
        more = start + TILE < end
        if more:
            _copy(
                kv_cache, front, key_front, of_latents, of_keys, block_stride, BLOCK_SIZE, num_warps
            )  # fmt: skip
        of_latents, of_keys = _places(places, start + 2 * TILE, end, spare, HALF, num_warps)
        if HALVES > 1:
            acc = warpgroup_mma_wait(0, deps=(acc,))
            if more:
                _copy(kv_cache, back, key_back, last_l, last_k, block_stride, BLOCK_SIZE, num_warps)
            ahead = start + 2 * TILE + HALF
            last_l, last_k = _places(places, ahead, end, spare, HALF, num_warps)
    total = gl.sum(summed, axis=OF_ROW)
    if not TURNED:
        total = gl.convert_layout(gl.sum(total, axis=1), peak.type.layout)
    _write(
        out, state, at * NUM_HEADS, first_head, split, peak, total, acc, NUM_HEADS, ROWS, LATENT,
        SPLITS, OF_ROW, SUMS, WRITTEN,
    )  # fmt: skip
