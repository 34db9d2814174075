"""Latent attention of decodes, absorbed: all heads of a token read the same rows of the cache.

A program owns ROWS query rows of one request, tokens times heads, and walks a part of the context.
A row of the cache is loaded once and serves as key and as value. With few rows the context is cut
into SPLITS parts, whose results `latent_merge_kernel` joins; how many depends on shapes alone, so
steps can be recorded.

TURNED, scores are computed with the context on the left: a matrix unit of Hopper takes 64 rows
there and no fewer, and there are 16 heads on a rank.

Which block comes next is read one tile ahead: a load whose address waits for another load would
leave the pipeline a tile short.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_scales import KVScales, pointers
from tandem_kernels.attention.latent_tile import (
    attend_rows,
    joined_parts,
    latent_queries,
    store_attended,
)
from tandem_kernels.attention.prefill_attention import LOG2_E
from tandem_kernels.device import num_programs
from tandem_kernels.product_precision import precision_of
from tandem_kernels.small_launches import in_turn, take_turn
from tandem_kernels.tunings.table import plain_table


@dataclass(frozen=True, slots=True)
class LatentDecodeTuning:
    """Says how one shape runs; found by timing variants.

    Attributes:
        rows: Query rows of a program, tokens times heads.
        tile: Tokens of the context at once.
        programs_per_sm: Contexts are cut until there are this many programs.
        most_splits: Parts of a context; a power of two.
        turned: Scores are computed with the context on the left.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 2
    most_splits: int = 16
    turned: bool = False


_TABLE = plain_table("latent_decode", LatentDecodeTuning, ("num_rows", "itemsize"))


def latent_decode_tuning(device: torch.device, num_rows: int, itemsize: int) -> LatentDecodeTuning:
    """Chooses by the query rows of a request.

    Args:
        num_rows: Tokens times heads.
        itemsize: Bytes of a number.
    """
    return _TABLE.choose(device, num_rows, itemsize)


def num_splits(tuning: LatentDecodeTuning, num_tiles: int, device: torch.device) -> int:
    """Returns into how many parts contexts are cut when there are this many tiles of rows."""
    free = num_programs(device, tuning.programs_per_sm) // num_tiles
    return min(tuning.most_splits, 1 << max(free.bit_length() - 1, 0))


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
def latent_decode_kernel(
    q_latent: tl.tensor,
    q_rope: tl.tensor,
    kv_cache: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    kv_scale: tl.tensor,
    out: tl.tensor,
    state: tl.tensor,
    latent_token_stride: tl.tensor,
    latent_head_stride: tl.tensor,
    rope_token_stride: tl.tensor,
    rope_head_stride: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    QUERY_LEN: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    TURNED: tl.constexpr,
    OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """Walks, in program (i, r, s), part s of the context of request r for its i-th tile of rows.
    Writes [T, H, L], or with SPLITS > 1 float32 [T, H, SPLITS, L] and its softmax state.
    """
    take_turn(OVERLAP)
    r = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens + r)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    real = token < QUERY_LEN
    own_position = seq_len - QUERY_LEN + token
    at = (r * QUERY_LEN + token).to(tl.int64)
    dim = tl.arange(0, BLOCK_LATENT)
    rot = tl.arange(0, BLOCK_ROPE)
    is_latent = (dim < LATENT)[None, :]
    is_rope = (rot < ROPE)[None, :]
    query, rotated = latent_queries(
        q_latent + at[:, None] * latent_token_stride + head[:, None] * latent_head_stride,
        q_rope + at[:, None] * rope_token_stride + head[:, None] * rope_head_stride,
        real, FP8, LATENT, BLOCK_LATENT, ROPE, BLOCK_ROPE,
    )  # fmt: skip
    if FP8:
        own_scale = tl.load(kv_scale)
        scale = scale * own_scale
    peak = tl.full([ROWS], -3.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_LATENT], tl.float32)
    part = tl.cdiv(tl.cdiv(seq_len, TILE), SPLITS) * TILE
    first = split * part
    end = tl.minimum(first + part, seq_len)
    lane = tl.arange(0, TILE)
    table = block_tables + r.to(tl.int64) * table_stride
    block = blocks_of(table, first, end, lane, BLOCK_SIZE, TILE)
    for start in range(first, end, TILE):
        position = start + lane
        inside = position < end
        line = kv_cache + block * block_stride + position % BLOCK_SIZE * (LATENT + ROPE)
        mask = inside[:, None] & is_latent
        latents = tl.load(line[:, None] + dim[None, :], mask=mask, other=0.0)
        block = blocks_of(table, start + TILE, end, lane, BLOCK_SIZE, TILE)
        mask = inside[:, None] & is_rope
        keys = tl.load(line[:, None] + LATENT + rot[None, :], mask=mask, other=0.0)
        if TURNED:
            seen = inside[:, None] & (position[:, None] <= own_position[None, :])
        else:
            seen = inside[None, :] & (position[None, :] <= own_position[:, None])
        peak, total, acc = attend_rows(
            query, rotated, latents, keys, seen, scale, peak, total, acc, TURNED, PRECISION
        )
    if FP8:
        acc = acc * own_scale
    index = at * NUM_HEADS + head
    store_attended(out, state, index, split, real, peak, total, acc, LATENT, BLOCK_LATENT, SPLITS)


@triton.jit
def latent_merge_kernel(
    parts: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Joins the parts of one row in each program."""
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK_LATENT)
    joined = joined_parts(parts, state, row, 0, LATENT, BLOCK_LATENT, SPLITS)
    tl.store(out + row * LATENT + dim, joined.to(out.dtype.element_ty), mask=dim < LATENT)


def latent_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: Tensor,
    tuning: LatentDecodeTuning | None = None,
    kv_scales: KVScales | None = None,
) -> None:
    """Attends for the decodes of `metadata`, which come first.

    Args:
        q_latent: [T, H, L] of the whole step.
        q_rope: [T, H, R], rotated.
        kv_cache: [N, B, L + R].
        scale: Multiplies the scores.
        out: [T, H, L] contiguous; rows of decodes are written.
        tuning: None: the choice for this shape.
        kv_scales: Of a cache of e4m3 numbers; None: it has those of the queries.
    """
    _, num_heads, latent = q_latent.shape
    num_decodes, query_len = metadata.num_decodes, metadata.decode_query_len
    tuning = tuning or latent_decode_tuning(
        q_latent.device, num_heads * query_len, q_latent.element_size()
    )
    row_tiles = triton.cdiv(num_heads * query_len, tuning.rows)
    splits = num_splits(tuning, num_decodes * row_tiles, q_latent.device)
    target, state = out, None
    if splits > 1:
        rows = num_decodes * query_len, num_heads, splits
        target, state = (
            torch.empty((*rows, width), dtype=torch.float32, device=out.device)
            for width in (latent, 2)
        )
    launch = in_turn(out.device, num_decodes * query_len)
    shape = {"LATENT": latent, "BLOCK_LATENT": triton.next_power_of_2(latent), "SPLITS": splits}
    latent_decode_kernel[(row_tiles, num_decodes, splits)](
        q_latent,
        q_rope,
        kv_cache,
        metadata.block_tables,
        metadata.seq_lens,
        pointers(kv_scales)[0],
        target,
        state,
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
        kv_cache.stride(0),
        metadata.block_tables.stride(0),
        scale * LOG2_E,
        QUERY_LEN=query_len,
        NUM_HEADS=num_heads,
        ROWS=tuning.rows,
        ROPE=q_rope.shape[2],
        BLOCK_ROPE=max(16, triton.next_power_of_2(q_rope.shape[2])),
        BLOCK_SIZE=kv_cache.shape[1],
        TILE=tuning.tile,
        TURNED=tuning.turned,
        PRECISION=precision_of(q_latent),
        FP8=kv_scales is not None,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **shape,
        **launch,
    )
    if state is not None:
        grid = (num_decodes * query_len * num_heads,)
        latent_merge_kernel[grid](target, state, out, num_warps=4, **shape, **launch)
