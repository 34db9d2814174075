"""The walk of latent attention over a paged context, tile by tile.

Which block comes next is read one tile ahead: a load whose address waits for another load would
leave the pipeline a tile short.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.attention.fp8_cache import unpacked
from tandem_kernels.attention.latent_tile import attend_rows


@triton.jit
def blocks_of(
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    lane: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Returns the block of positions `start` and on: one where a tile lies within a block, else
    [TILE]."""
    position = start
    if BLOCK_SIZE % TILE != 0:
        position = start + lane
    block = tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)
    return block.to(tl.int64)


@triton.jit
def walk(
    query: tl.tensor,
    rotated: tl.tensor,
    kv_cache: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    own_position: tl.tensor,
    block_stride: tl.tensor,
    scale: tl.tensor,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TURNED: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns the softmax state (peak, sum, accumulator) of ROWS queries over positions from
    `first` to `end`. FP8: rows are pairs of numbers, see `fp8_cache`."""
    row_latent: tl.constexpr = LATENT // 2 if FP8 else LATENT
    row_rope: tl.constexpr = ROPE // 2 if FP8 else ROPE
    dim = tl.arange(0, BLOCK_LATENT // 2 if FP8 else BLOCK_LATENT)
    rot = tl.arange(0, BLOCK_ROPE // 2 if FP8 else BLOCK_ROPE)
    lane = tl.arange(0, TILE)
    peak = tl.full([ROWS], -3.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_LATENT], tl.float32)
    block = blocks_of(table, first, end, lane, BLOCK_SIZE, TILE)
    for start in range(first, end, TILE):
        position = start + lane
        inside = position < end
        line_of = kv_cache + block * block_stride + position % BLOCK_SIZE * (row_latent + row_rope)
        mask = inside[:, None] & (dim < row_latent)[None, :]
        latents = tl.load(line_of[:, None] + dim[None, :], mask=mask, other=0)
        block = blocks_of(table, start + TILE, end, lane, BLOCK_SIZE, TILE)
        mask = inside[:, None] & (rot < row_rope)[None, :]
        keys = tl.load(line_of[:, None] + row_latent + rot[None, :], mask=mask, other=0)
        if FP8:
            latents, odd = unpacked(latents, NATIVE)
            latents = tl.interleave(latents, odd)
            keys, odd = unpacked(keys, NATIVE)
            keys = tl.interleave(keys, odd)
        if TURNED:
            seen = inside[:, None] & (position[:, None] <= own_position[None, :])
        else:
            seen = inside[None, :] & (position[None, :] <= own_position[:, None])
        peak, total, acc = attend_rows(
            query, rotated, latents, keys, seen, scale, peak, total, acc, TURNED, PRECISION
        )
    return peak, total, acc
