"""Latent attention of decodes with many heads on Hopper: 64 query rows of 128 tokens at once.

    one warp       asks the copy engine for a tile's pieces, each as soon as its memory is free
    eight warps    scores 0 | 1 | 2 | 3 |    weights    | values 0 | 1 | 2 | 3 | scores 0' | 1' ..
    copies         .. 2     | 3                                    | 0'| 1'| 2'| 3'

Four warps multiply with half of a tile's tokens for scores, and with half of its numbers for
values. There is memory for one tile, so it is cut across: a piece has a quarter of the numbers of
all rows, and is free once its part of the values has been multiplied. Weights lie where the tile
had rotated keys. What is walked is the line of tiles of `latent_decode`, and parts are joined
alike.

All but the newest tokens were written in earlier steps: tiles of theirs are asked for before the
kernels in front have ended (PDL).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.latent_line import own_run, stretch
from tandem_kernels.attention.latent_tiles import folded, row_weights
from tandem_kernels.late_wait import wait_behind

copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Has another name from Triton 3.9 on."""
PIECES = gl.constexpr(4)
BOX_DIMS = gl.constexpr(64)
"""Numbers of a row that one copy brings: 128 bytes."""
BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
FEWEST_OF_BOX, _MOST_OF_BOX = 8, 64
"""Tokens that one copy brings: lanes are interleaved over eight, and blocks may end in a tile."""
_COPIER_REGISTERS = 40


@gluon.jit
def box_of(
    table: gl.tensor, position: gl.tensor, seq_len: gl.tensor, BLOCK_SIZE: gl.constexpr,
    BOX_TOKENS: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """Returns the block, and where in it the box of tokens from `position` on begins; behind the
    last one, that of the last: numbers that count for nothing."""
    position = gl.minimum(position, seq_len - 1)
    block = gl.load(table + position // BLOCK_SIZE)
    return block, position % BLOCK_SIZE // BOX_TOKENS * BOX_TOKENS


@gluon.jit
def _bring(rows: gl.tensor, size: gl.tensor) -> None:
    """Brings `size` bytes from `rows` on into the L2 cache, without waiting for them."""
    gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;"
        " @first cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [rows, size], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _copy(
    given: gl.tuple, memory: gl.tuple, sizes: gl.tuple, cache: gl.tuple,
    QUERY_LEN: gl.constexpr, ROW: gl.constexpr, ROW_TILES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BOX_TOKENS: gl.constexpr, TILE: gl.constexpr, REQS: gl.constexpr, OVERLAP: gl.constexpr,
) -> None:  # fmt: skip
    """Asks for all tiles of this program's run, and has the next one brought nearer meanwhile."""
    kv_cache, block_tables, seq_lens = given[:3]
    boxes, key_boxes, full, empty = memory[:4]
    num_reqs, table_stride = sizes[:2]
    numbers, block_stride = cache
    size_of_box = num_reqs * 0 + BOX_TOKENS * ROW * 2
    BOXES: gl.constexpr = TILE // BOX_TOKENS
    HALVES: gl.constexpr = 2
    ends, here, end = own_run(seq_lens, num_reqs, ROW_TILES, TILE, REQS, 1)
    count = here * 0
    while here < end:
        r, seq_len, _, _, first, last = stretch(ends, here, end, seq_lens, TILE)
        table = block_tables + r.to(gl.int64) * table_stride
        for tile in range(first, last):
            free = count & 1 ^ 1
            start = tile * TILE
            if OVERLAP:  # noqa: SIM102
                if start + TILE > seq_len - QUERY_LEN:
                    gdc_wait()
            mbarrier.wait(empty.index(PIECES), free)
            ready = full.index(PIECES)
            mbarrier.expect(ready, TILE * 128)
            for box in gl.static_range(BOXES):
                block, at = box_of(table, start + box * BOX_TOKENS, seq_len, BLOCK_SIZE, BOX_TOKENS)
                copy_box(
                    kv_cache, [block, at, PIECES * HALVES * BOX_DIMS], ready, key_boxes.index(box)
                )
            for piece in gl.static_range(PIECES):
                mbarrier.wait(empty.index(piece), free)
                ready = full.index(piece)
                mbarrier.expect(ready, HALVES * TILE * 128)
                for box in gl.static_range(BOXES):
                    position = start + box * BOX_TOKENS
                    block, at = box_of(table, position, seq_len, BLOCK_SIZE, BOX_TOKENS)
                    for half in gl.static_range(HALVES):
                        part = piece * HALVES + half
                        copy_box(
                            kv_cache, [block, at, part * BOX_DIMS], ready,
                            boxes.index(part * BOXES + box),
                        )  # fmt: skip
            if tile + 1 < last:
                for box in gl.static_range(BOXES):
                    position = start + TILE + box * BOX_TOKENS
                    block, at = box_of(table, position, seq_len, BLOCK_SIZE, BOX_TOKENS)
                    _bring(numbers + block.to(gl.int64) * block_stride + at * ROW, size_of_box)
            count += 1
        here += last - first


@gluon.jit
def _store_queries(
    rows: gl.tensor, at: gl.tensor, real: gl.tensor, to: gl.shared_memory_descriptor,
    LAYOUT: gl.constexpr,
) -> None:  # fmt: skip
    """Loads a part of the query rows that begin at `at`."""
    dim = gl.arange(0, to.shape[1], gl.SliceLayout(0, LAYOUT))
    to.store(gl.load(rows + at[:, None] + dim[None, :], mask=real[:, None], other=0.0))


@gluon.jit
def _without_rows_behind(
    latents: gl.shared_memory_descriptor, count: gl.tensor, full: gl.shared_memory_descriptor,
    phase: gl.tensor, LAYOUT: gl.constexpr,
) -> None:  # fmt: skip
    """Makes a tile's rows from `count` on zero: memory has anything there, and no weight makes zero
    of what is not a number."""
    row = gl.arange(0, latents.shape[1], gl.SliceLayout(1, LAYOUT))
    for piece in gl.static_range(PIECES):
        mbarrier.wait(full.index(piece), phase)
        part = latents.index(piece)
        found = part.load(LAYOUT)
        part.store(gl.where((row < count)[:, None], found, gl.zeros_like(found)))
    fence_async_shared()


@gluon.jit
def _scores(
    queries: gl.shared_memory_descriptor, rotated: gl.shared_memory_descriptor,
    latents: gl.shared_memory_descriptor, keys: gl.shared_memory_descriptor,
    full: gl.shared_memory_descriptor, phase: gl.tensor, none: gl.tensor,
) -> gl.tensor:  # fmt: skip
    """Multiplies queries with each piece of a tile as soon as it is there."""
    mbarrier.wait(full.index(PIECES), phase)
    scores = warpgroup_mma(rotated, keys.permute((1, 0)), none, use_acc=False, is_async=True)
    for piece in gl.static_range(PIECES):
        mbarrier.wait(full.index(piece), phase)
        part = latents.index(piece).permute((1, 0))
        scores = warpgroup_mma(queries.index(piece), part, scores, is_async=True)
    return warpgroup_mma_wait(0, deps=(scores,))


@gluon.jit
def _write(
    out: gl.tensor, line: gl.tensor, real: gl.tensor, sums: gl.tensor, first: gl.constexpr
) -> None:
    """Writes a piece of the rows that begin at `line`."""
    dim = first + gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
    gl.store(out + line[:, None] + dim[None, :], sums.to(out.dtype.element_ty), mask=real[:, None])


@gluon.jit
def _attend(
    given: gl.tuple, memory: gl.tuple, sizes: gl.tuple,
    QUERY_LEN: gl.constexpr, NUM_HEADS: gl.constexpr, ROWS: gl.constexpr, ROW_TILES: gl.constexpr,
    LATENT: gl.constexpr, TILE: gl.constexpr, REQS: gl.constexpr, OVERLAP: gl.constexpr,
) -> None:  # fmt: skip
    """Attends to all tiles of this program's run."""
    WIDTH: gl.constexpr = LATENT // PIECES
    BY_16: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    BY_8: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16])
    SHARE: gl.constexpr = gl.DotOperandLayout(0, PRODUCTS, 2)
    q_latent, q_rope, out, partial_acc, partial_state = given[3:]
    full, empty, latents, keys, shares, queries, rotated = memory[2:]
    seq_lens = given[2]
    num_reqs = sizes[0]
    latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride, scale = sizes[2:]
    kind: gl.constexpr = q_latent.dtype.element_ty
    lane = gl.arange(0, TILE, gl.SliceLayout(0, PRODUCTS))
    none = gl.zeros([ROWS, TILE], gl.float32, PRODUCTS)
    program = gl.program_id(0)
    ends, here, end = own_run(seq_lens, num_reqs, ROW_TILES, TILE, REQS, 8)
    r, seq_len, tiles, row_tile, first, last = stretch(ends, here, end, seq_lens, TILE)
    if OVERLAP:
        wait_behind(ends + (r + seq_len + tiles + row_tile + first + last))
    count = here * 0
    while here < end:
        row = row_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, BY_16))
        token, head = row // NUM_HEADS, row % NUM_HEADS
        at = (r * QUERY_LEN + token).to(gl.int64) * latent_token_stride + head * latent_head_stride
        for piece in gl.static_range(PIECES):
            _store_queries(
                q_latent + piece * WIDTH, at, token < QUERY_LEN, queries.index(piece), BY_16
            )
        row = row_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, BY_8))
        token, head = row // NUM_HEADS, row % NUM_HEADS
        at = (r * QUERY_LEN + token).to(gl.int64) * rope_token_stride + head * rope_head_stride
        _store_queries(q_rope, at, token < QUERY_LEN, rotated, BY_8)
        fence_async_shared()
        row = row_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, PRODUCTS))
        token = row // NUM_HEADS
        own_position = seq_len - QUERY_LEN + token
        peak = gl.full([ROWS], -3.0e38, gl.float32, gl.SliceLayout(1, PRODUCTS))
        summed = folded(none)
        sums_0 = gl.zeros([ROWS, WIDTH], gl.float32, PRODUCTS)
        sums_1, sums_2, sums_3 = sums_0, sums_0, sums_0
        for tile in range(first, last):
            phase = count & 1
            start = tile * TILE
            if start + TILE > seq_len:
                _without_rows_behind(latents, seq_len - start, full, phase, BY_16)
            scores = _scores(queries, rotated, latents, keys, full, phase, none)
            if QUERY_LEN == 1:
                seen = (start + lane < seq_len)[None, :]
            else:
                seen = (start + lane)[None, :] <= own_position[:, None]
            weights, peak, summed, shrink = row_weights(scores, seen, scale, peak, summed)
            # What the tile had of keys has been multiplied.
            shares.store(weights.to(kind))
            share = shares.load(SHARE)
            fence_async_shared()
            mbarrier.arrive(empty.index(PIECES), count=1)
            by = shrink[:, None]
            sums_0 = warpgroup_mma(share, latents.index(0), sums_0 * by, is_async=True)
            sums_1 = warpgroup_mma(share, latents.index(1), sums_1 * by, is_async=True)
            sums_2 = warpgroup_mma(share, latents.index(2), sums_2 * by, is_async=True)
            sums_3 = warpgroup_mma(share, latents.index(3), sums_3 * by, is_async=True)
            sums_0 = warpgroup_mma_wait(3, deps=(sums_0,))
            mbarrier.arrive(empty.index(0), count=1)
            sums_1 = warpgroup_mma_wait(2, deps=(sums_1,))
            mbarrier.arrive(empty.index(1), count=1)
            sums_2 = warpgroup_mma_wait(1, deps=(sums_2,))
            mbarrier.arrive(empty.index(2), count=1)
            sums_3 = warpgroup_mma_wait(0, deps=(sums_3,))
            mbarrier.arrive(empty.index(3), count=1)
            count += 1
        total = gl.convert_layout(gl.sum(gl.sum(summed, axis=2), axis=1), peak.type.layout)
        real = token < QUERY_LEN
        if (first == 0) & (last == tiles):
            line = ((r * QUERY_LEN).to(gl.int64) * NUM_HEADS + row) * LATENT
            factor = (1.0 / total)[:, None]
            _write(out, line, real, sums_0 * factor, 0)
            _write(out, line, real, sums_1 * factor, WIDTH)
            _write(out, line, real, sums_2 * factor, 2 * WIDTH)
            _write(out, line, real, sums_3 * factor, 3 * WIDTH)
        else:
            slot = program.to(gl.int64) * 2 + (first == 0).to(gl.int64)
            own = gl.arange(0, ROWS, gl.SliceLayout(1, PRODUCTS))
            gl.store(partial_state + slot * (2 * ROWS) + own, peak, mask=real)
            gl.store(partial_state + slot * (2 * ROWS) + ROWS + own, total, mask=real)
            line = (slot * ROWS + own) * LATENT
            _write(partial_acc, line, real, sums_0, 0)
            _write(partial_acc, line, real, sums_1, WIDTH)
            _write(partial_acc, line, real, sums_2, 2 * WIDTH)
            _write(partial_acc, line, real, sums_3, 3 * WIDTH)
        here += last - first
        if here < end:
            r, seq_len, tiles, row_tile, first, last = stretch(ends, here, end, seq_lens, TILE)


@gluon.jit(do_not_specialize=["num_reqs"])
def latent_decode_ahead_kernel(
    q_latent: gl.tensor,
    q_rope: gl.tensor,
    kv_cache: tma.tensor_descriptor,
    numbers: gl.tensor,
    block_tables: gl.tensor,
    seq_lens: gl.tensor,
    out: gl.tensor,
    partial_acc: gl.tensor,
    partial_state: gl.tensor,
    num_reqs: gl.tensor,
    latent_token_stride: gl.tensor,
    latent_head_stride: gl.tensor,
    rope_token_stride: gl.tensor,
    rope_head_stride: gl.tensor,
    block_stride: gl.tensor,
    table_stride: gl.tensor,
    scale: gl.tensor,
    QUERY_LEN: gl.constexpr, NUM_HEADS: gl.constexpr, ROWS: gl.constexpr, ROW_TILES: gl.constexpr,
    LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
    REQS: gl.constexpr, COPIER_REGISTERS: gl.constexpr, OVERLAP: gl.constexpr,
) -> None:  # fmt: skip
    """Walks one run of the line in each program. `numbers`: also of the cache, to bring them into
    L2. Writes what `latent_decode_kernel` does."""
    if OVERLAP:
        gdc_launch_dependents()
    WIDTH: gl.constexpr = LATENT // PIECES
    kind: gl.constexpr = q_latent.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], kind)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, ROPE], kind)
    BOX_TOKENS: gl.constexpr = kv_cache.block_shape[1]
    BOXES: gl.constexpr = TILE // BOX_TOKENS
    boxes = gl.allocate_shared_memory(
        kind, [LATENT // BOX_DIMS * BOXES, 1, BOX_TOKENS, BOX_DIMS], kv_cache.layout
    )
    key_boxes = gl.allocate_shared_memory(kind, [BOXES, 1, BOX_TOKENS, ROPE], kv_cache.layout)
    latents = boxes._reinterpret(kind, [PIECES, TILE, WIDTH], wide)
    keys = key_boxes._reinterpret(kind, [TILE, ROPE], narrow)
    shares = key_boxes._reinterpret(kind, [ROWS, TILE], wide)
    queries = gl.allocate_shared_memory(kind, [PIECES, ROWS, WIDTH], wide)
    rotated = gl.allocate_shared_memory(kind, [ROWS, ROPE], narrow)
    full = gl.allocate_shared_memory(gl.int64, [PIECES + 1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PIECES + 1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(PIECES + 1):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    # The copy engine sees barriers by a way of its own.
    fence_async_shared()
    given = (
        kv_cache, block_tables, seq_lens, q_latent, q_rope, out, partial_acc, partial_state
    )  # fmt: skip
    memory = (boxes, key_boxes, full, empty, latents, keys, shares, queries, rotated)
    sizes = (
        num_reqs, table_stride, latent_token_stride, latent_head_stride, rope_token_stride,
        rope_head_stride, scale,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    given, memory, sizes, QUERY_LEN, NUM_HEADS, ROWS, ROW_TILES, LATENT, TILE, REQS,
                    OVERLAP,
                ),
            ),
            (
                _copy,
                (
                    given, memory, sizes, (numbers, block_stride), QUERY_LEN, LATENT + ROPE,
                    ROW_TILES, BLOCK_SIZE, BOX_TOKENS, TILE, REQS, OVERLAP,
                ),
            ),
        ],
        [1],
        [COPIER_REGISTERS],
    )  # fmt: skip


def described(kv_cache: Tensor) -> TensorDescriptor:
    """Describes [N, B, L + R] to the copy engine, box by box."""
    box = [1, gcd(_MOST_OF_BOX, kv_cache.shape[1]), BOX_DIMS.value]
    return TensorDescriptor.from_tensor(kv_cache, box, BOX)


def decode_ahead(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: Tensor,
    parts: Sequence[Tensor],
    shape: Mapping[str, int],
) -> None:
    """Attends for the decodes of `metadata`, in as many programs as there are `parts`.

    Args:
        q_latent, q_rope: [T, H, L] and [T, H, R].
        kv_cache: [N, B, L + R].
        scale: Of scores, in powers of two.
        parts: Accumulators [P, 2, ROWS, L] and softmax states, for what is cut.
        shape: Sizes that the kernel is compiled for, and how it is launched.
    """
    latent_decode_ahead_kernel[(len(parts[0]),)](
        q_latent, q_rope, described(kv_cache), kv_cache, metadata.block_tables, metadata.seq_lens,
        out, *parts, metadata.num_decodes, *q_latent.stride()[:2], *q_rope.stride()[:2],
        kv_cache.stride(0), metadata.block_tables.stride(0), scale,
        COPIER_REGISTERS=_COPIER_REGISTERS,
        num_warps=8,
        **shape,
    )  # fmt: skip
