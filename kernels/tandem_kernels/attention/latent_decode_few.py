"""Latent attention of decodes with few heads on Hopper: 16 query rows of 64 tokens at once.

    one warp       asks the copy engine for tiles; or, of an FP8 cache,
    four warps     bring them, in half precision (`latent_widen`)
    four warps     scores, weights, values of the tile that is there

A matrix unit takes 64 rows on the left and no fewer, so there the context is, in both products.
There is memory for two tiles.

All but the newest tokens were written in earlier steps, so the copy engine is asked for their tiles
before the kernels in front have ended (PDL). Warps that widen an FP8 cache wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.latent_decode_ahead import BOX_DIMS, box_of, copy_box, described
from tandem_kernels.attention.latent_line import own_run, stretch
from tandem_kernels.attention.latent_tiles import tile_memory
from tandem_kernels.attention.latent_widen import widen
from tandem_kernels.late_wait import wait_behind

STAGES = gl.constexpr(2)
_TAIL_PIECES = gl.constexpr(4)
MOST_OF_FEW = 16
"""Query rows of a program."""
_WIDENER_REGISTERS, _COPIER_REGISTERS = 200, 40


@gluon.jit
def _queries(
    rows: gl.tensor, at: gl.tensor, real: gl.tensor, WIDTH: gl.constexpr, FP8: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Loads query rows that begin at `at`; FP8: in half precision."""
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    found = gl.load(rows + at[:, None] + dim[None, :], mask=real[:, None], other=0.0)
    if FP8:
        wide = found.to(gl.float32)
        found = gl.minimum(gl.maximum(wide, -65504.0), 65504.0).to(gl.float16)
    return found


@gluon.jit
def _without_rows_behind(
    latents: gl.shared_memory_descriptor, count: gl.tensor, LAYOUT: gl.constexpr
) -> None:
    """Makes a tile's rows from `count` on zero; see `latent_decode_ahead`."""
    WIDTH: gl.constexpr = latents.shape[1] // _TAIL_PIECES
    row = gl.arange(0, latents.shape[0], gl.SliceLayout(1, LAYOUT))
    for piece in gl.static_range(_TAIL_PIECES):
        part = latents.slice(piece * WIDTH, WIDTH, dim=1)
        found = part.load(LAYOUT)
        part.store(gl.where((row < count)[:, None], found, gl.zeros_like(found)))
    fence_async_shared()


@gluon.jit
def _write(
    out: gl.tensor, line: gl.tensor, real: gl.tensor, acc: gl.tensor, WRITTEN: gl.constexpr
) -> None:
    """Writes `acc` [latent, rows] to the rows that begin at `line`."""
    found = gl.convert_layout(acc.to(out.dtype.element_ty), WRITTEN)
    dim = gl.arange(0, acc.shape[0], gl.SliceLayout(1, WRITTEN))
    gl.store(out + line[None, :] + dim[:, None], found, mask=real[None, :])


@gluon.jit
def _copy(
    given: gl.tuple, memory: gl.tuple, sizes: gl.tuple,
    QUERY_LEN: gl.constexpr, ROW_TILES: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, REQS: gl.constexpr, OVERLAP: gl.constexpr,
) -> None:  # fmt: skip
    """Asks for all tiles of this program's run."""
    kv_cache, block_tables, seq_lens = given[:3]
    full, empty = memory[2:4]
    boxes, key_boxes = memory[7:]
    num_reqs, table_stride = sizes[:2]
    BOX_TOKENS: gl.constexpr = kv_cache.block_shape[1]
    BOXES: gl.constexpr = TILE // BOX_TOKENS
    PARTS: gl.constexpr = LATENT // BOX_DIMS
    ends, here, end = own_run(seq_lens, num_reqs, ROW_TILES, TILE, REQS, 1)
    count = here * 0
    while here < end:
        r, seq_len, _, _, first, last = stretch(ends, here, end, seq_lens, TILE)
        table = block_tables + r.to(gl.int64) * table_stride
        for tile in range(first, last):
            slot = count % STAGES
            ready = full.index(slot)
            if OVERLAP:  # noqa: SIM102
                if tile * TILE + TILE > seq_len - QUERY_LEN:
                    gdc_wait()
            mbarrier.wait(empty.index(slot), count // STAGES & 1 ^ 1)
            mbarrier.expect(ready, TILE * (LATENT + ROPE) * 2)
            for box in gl.static_range(BOXES):
                position = tile * TILE + box * BOX_TOKENS
                block, at = box_of(table, position, seq_len, BLOCK_SIZE, BOX_TOKENS)
                for part in gl.static_range(PARTS):
                    to = boxes.index((slot * PARTS + part) * BOXES + box)
                    copy_box(kv_cache, [block, at, part * BOX_DIMS], ready, to)
                copy_box(kv_cache, [block, at, LATENT], ready, key_boxes.index(slot * BOXES + box))
            count += 1
        here += last - first


@gluon.jit
def _attend(
    given: gl.tuple, memory: gl.tuple, sizes: gl.tuple,
    QUERY_LEN: gl.constexpr, NUM_HEADS: gl.constexpr, ROWS: gl.constexpr, ROW_TILES: gl.constexpr,
    LATENT: gl.constexpr, ROPE: gl.constexpr, TILE: gl.constexpr, REQS: gl.constexpr,
    FP8: gl.constexpr, OVERLAP: gl.constexpr,
) -> None:  # fmt: skip
    """Attends to all tiles of this program's run."""
    LATENTS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    WRITTEN: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [4, 1], [0, 1])
    q_latent, q_rope, kv_scale, out, partial_acc, partial_state = given[3:]
    latents, keys, full, empty, shares, query, rotated = memory[:7]
    seq_lens = given[2]
    num_reqs = sizes[0]
    latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride, scale = sizes[3:]
    TAIL: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    kind: gl.constexpr = query.dtype
    ends, here, end = own_run(seq_lens, num_reqs, ROW_TILES, TILE, REQS, 4)
    r, seq_len, tiles, row_tile, first, last = stretch(ends, here, end, seq_lens, TILE)
    if OVERLAP:
        wait_behind(ends + (r + seq_len + tiles + row_tile + first + last))
    if FP8:
        own_scale = gl.load(kv_scale)
        scale = scale * own_scale
    lane = gl.arange(0, TILE, gl.SliceLayout(1, PRODUCTS))
    none = gl.zeros([TILE, ROWS], gl.float32, PRODUCTS)
    program = gl.program_id(0)
    count = here * 0
    while here < end:
        row = row_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LATENTS))
        token, head = row // NUM_HEADS, row % NUM_HEADS
        at = (r * QUERY_LEN + token).to(gl.int64) * latent_token_stride + head * latent_head_stride
        query.store(_queries(q_latent, at, token < QUERY_LEN, LATENT, FP8, LATENTS))
        row = row_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, KEYS))
        token, head = row // NUM_HEADS, row % NUM_HEADS
        at = (r * QUERY_LEN + token).to(gl.int64) * rope_token_stride + head * rope_head_stride
        rotated.store(_queries(q_rope, at, token < QUERY_LEN, ROPE, FP8, KEYS))
        fence_async_shared()
        row = row_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, PRODUCTS))
        own_position = seq_len - QUERY_LEN + row // NUM_HEADS
        peak = gl.full([ROWS], -3.0e38, gl.float32, gl.SliceLayout(0, PRODUCTS))
        summed = none
        acc = gl.zeros([LATENT, ROWS], gl.float32, PRODUCTS)
        for tile in range(first, last):
            slot = count % STAGES
            mbarrier.wait(full.index(slot), count // STAGES & 1)
            own = latents.index(slot)
            if not FP8:  # noqa: SIM102
                if tile * TILE + TILE > seq_len:
                    _without_rows_behind(own, seq_len - tile * TILE, TAIL)
            turned = query.permute((1, 0))
            scores = warpgroup_mma(own, turned, none, use_acc=False, is_async=True)
            turned = rotated.permute((1, 0))
            scores = warpgroup_mma(keys.index(slot), turned, scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            position = tile * TILE + lane
            seen = (position < seq_len)[:, None] & (position[:, None] <= own_position[None, :])
            scores = gl.where(seen, scores * scale, float("-inf"))
            higher = gl.maximum(peak, gl.max(scores, axis=0))
            shrink = gl.exp2(peak - higher)
            weights = gl.exp2(scores - higher[None, :])
            summed = summed * shrink[None, :] + weights
            peak = higher
            shares.store(weights.to(kind))
            fence_async_shared()
            acc = warpgroup_mma(own.permute((1, 0)), shares, acc * shrink[None, :], is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(slot), count=1)
            count += 1
        total = gl.sum(summed, axis=0)
        if FP8:
            acc *= own_scale
        row = row_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, WRITTEN))
        real = row < QUERY_LEN * NUM_HEADS
        if (first == 0) & (last == tiles):
            line = ((r * QUERY_LEN).to(gl.int64) * NUM_HEADS + row) * LATENT
            _write(out, line, real, acc * (1.0 / total)[None, :], WRITTEN)
        else:
            slot = program.to(gl.int64) * 2 + (first == 0).to(gl.int64)
            own_row = gl.arange(0, ROWS, peak.type.layout)
            kept = row_tile * ROWS + own_row < QUERY_LEN * NUM_HEADS
            gl.store(partial_state + slot * (2 * ROWS) + own_row, peak, mask=kept)
            gl.store(partial_state + slot * (2 * ROWS) + ROWS + own_row, total, mask=kept)
            line = (slot * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, WRITTEN))) * LATENT
            _write(partial_acc, line, real, acc, WRITTEN)
        here += last - first
        if here < end:
            r, seq_len, tiles, row_tile, first, last = stretch(ends, here, end, seq_lens, TILE)


@gluon.jit(do_not_specialize=["num_reqs"])
def latent_decode_few_kernel(
    q_latent: gl.tensor,
    q_rope: gl.tensor,
    kv_cache: gl.tensor,
    block_tables: gl.tensor,
    seq_lens: gl.tensor,
    kv_scale: gl.tensor,
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
    REQS: gl.constexpr, WORKER_REGISTERS: gl.constexpr, FP8: gl.constexpr, OVERLAP: gl.constexpr,
) -> None:  # fmt: skip
    """Walks one run of the line in each program. Writes what `latent_decode_kernel` does."""
    if OVERLAP:
        gdc_launch_dependents()
    kind: gl.constexpr = gl.float16 if FP8 else q_latent.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, LATENT], kind)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, ROPE], kind)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    # The copy engine sees barriers by a way of its own.
    fence_async_shared()
    shares = tile_memory(TILE, ROWS, kind)
    query, rotated = tile_memory(ROWS, LATENT, kind), tile_memory(ROWS, ROPE, kind)
    given = (
        kv_cache, block_tables, seq_lens, q_latent, q_rope, kv_scale, out, partial_acc,
        partial_state,
    )  # fmt: skip
    sizes = (
        num_reqs, table_stride, block_stride, latent_token_stride, latent_head_stride,
        rope_token_stride, rope_head_stride, scale,
    )  # fmt: skip
    if FP8:
        words: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, ROPE // 2], gl.int32)
        latents = gl.allocate_shared_memory(kind, [STAGES, TILE, LATENT], wide)
        keys = gl.allocate_shared_memory(kind, [STAGES, TILE, ROPE], narrow)
        memory = (
            latents, keys, full, empty, shares, query, rotated,
            latents._reinterpret(gl.int32, [STAGES, TILE, LATENT // 2], words),
            keys._reinterpret(gl.int32, [STAGES, TILE, ROPE // 2], words),
        )  # fmt: skip
        gl.warp_specialize(
            [
                (
                    _attend,
                    (
                        given, memory, sizes, QUERY_LEN, NUM_HEADS, ROWS, ROW_TILES, LATENT, ROPE,
                        TILE, REQS, FP8, OVERLAP,
                    ),
                ),
                (
                    widen,
                    (
                        given, memory, sizes, ROW_TILES, LATENT, ROPE, BLOCK_SIZE, TILE, REQS,
                        STAGES, OVERLAP,
                    ),
                ),
            ],
            [4],
            [WORKER_REGISTERS],
        )  # fmt: skip
    else:
        BOX_TOKENS: gl.constexpr = kv_cache.block_shape[1]
        COUNT: gl.constexpr = STAGES * (TILE // BOX_TOKENS)
        boxes = gl.allocate_shared_memory(
            kind, [COUNT * (LATENT // BOX_DIMS), 1, BOX_TOKENS, BOX_DIMS], kv_cache.layout
        )
        key_boxes = gl.allocate_shared_memory(kind, [COUNT, 1, BOX_TOKENS, ROPE], kv_cache.layout)
        memory = (
            boxes._reinterpret(kind, [STAGES, TILE, LATENT], wide),
            key_boxes._reinterpret(kind, [STAGES, TILE, ROPE], narrow),
            full, empty, shares, query, rotated, boxes, key_boxes,
        )  # fmt: skip
        gl.warp_specialize(
            [
                (
                    _attend,
                    (
                        given, memory, sizes, QUERY_LEN, NUM_HEADS, ROWS, ROW_TILES, LATENT, ROPE,
                        TILE, REQS, FP8, OVERLAP,
                    ),
                ),
                (
                    _copy,
                    (
                        given, memory, sizes, QUERY_LEN, ROW_TILES, LATENT, ROPE, BLOCK_SIZE, TILE,
                        REQS, OVERLAP,
                    ),
                ),
            ],
            [1],
            [WORKER_REGISTERS],
        )  # fmt: skip


def decode_few(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: Tensor,
    parts: Sequence[Tensor],
    shape: Mapping[str, int],
    kv_scale: Tensor | None,
) -> None:
    """Does what `decode_ahead` does. `kv_scale`: of numbers in e4m3."""
    numbers: Any = described(kv_cache) if kv_scale is None else kv_cache.view(torch.int32)
    latent_decode_few_kernel[(len(parts[0]),)](
        q_latent, q_rope, numbers, metadata.block_tables, metadata.seq_lens, kv_scale, out, *parts,
        metadata.num_decodes, *q_latent.stride()[:2], *q_rope.stride()[:2], kv_cache.stride(0) // 4,
        metadata.block_tables.stride(0), scale,
        WORKER_REGISTERS=_COPIER_REGISTERS if kv_scale is None else _WIDENER_REGISTERS,
        FP8=kv_scale is not None,
        num_warps=4,
        **shape,
    )  # fmt: skip
