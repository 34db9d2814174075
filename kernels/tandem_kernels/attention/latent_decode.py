"""Latent attention of decodes, absorbed: all heads of a token read the same rows of the cache.

A program owns ROWS query rows of one request, tokens times heads, and walks a part of the context.
A row of the cache is loaded once and serves as key and as value. All that is walked is one line of
tiles, as in `decode_attention`: as many programs as the device holds cut it into equal runs, and
`merge_kernel` joins the parts of a context. Lengths are read on the device, so that steps can be
recorded, and one long context among short ones takes all programs.

TURNED, scores are computed with the context on the left: a matrix unit of Hopper takes 64 rows
there and no fewer, and there are 16 heads on a rank. Sizes of DeepSeek have kernels of their own
there, `latent_decode_few` and `latent_decode_ahead`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.decode_line import aligned_run, find, line
from tandem_kernels.attention.decode_merge import FEW_UNITS, merge_kernel, merge_shape
from tandem_kernels.attention.kv_scales import KVScales, pointers
from tandem_kernels.attention.latent_decode_ahead import (
    FEWEST_OF_BOX,
    decode_ahead,
    latent_decode_ahead_kernel,
)
from tandem_kernels.attention.latent_decode_few import (
    MOST_OF_FEW,
    decode_few,
    latent_decode_few_kernel,
)
from tandem_kernels.attention.latent_tile import latent_queries
from tandem_kernels.attention.latent_walk import walk
from tandem_kernels.attention.prefill_attention import LOG2_E
from tandem_kernels.device import has_e4m3, has_warpgroup_mma, num_programs
from tandem_kernels.product_precision import precision_of
from tandem_kernels.small_launches import in_turn, take_turn
from tandem_kernels.tunings.table import plain_table


@dataclass(frozen=True, slots=True)
class LatentDecodeTuning:
    """Says how one shape runs; found by timing variants.

    Attributes:
        rows: Query rows of a program, tokens times heads.
        tile: Tokens of the context at once.
        programs_per_sm: Of the grid, which depends on nothing else.
        turned: Scores are computed with the context on the left.
        ahead: By a kernel whose warps either copy or multiply, `decode_few` or `decode_ahead`, as
            many as it has.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 2
    turned: bool = False
    ahead: bool = False


_AHEAD = ((16, 64), (64, 128))
"""Rows and tiles for which there is a kernel whose warps either copy or multiply; e4m3 numbers are
read by the first alone."""

_TABLE = plain_table(
    "latent_decode",
    LatentDecodeTuning,
    ("num_rows", "itemsize", "num_decodes", "turns", "is_ahead"),
)


def latent_decode_tuning(
    device: torch.device,
    num_rows: int,
    itemsize: int,
    num_decodes: int,
    *,
    turns: bool,
    is_ahead: bool = False,
) -> LatentDecodeTuning:
    """Chooses by what a request has, and how many there are.

    Args:
        num_rows: Tokens times heads.
        itemsize: Bytes of a number.
        turns: Matrix units multiply for four warps at once, as on Hopper, numbers of 16 bits: those
            of an FP8 cache cannot be multiplied without moving them first.
        is_ahead: See `copies_ahead`.
    """
    return _TABLE.choose(device, num_rows, itemsize, num_decodes, turns, is_ahead)


def copies_ahead(
    q_latent: Tensor, q_rope: Tensor, kv_cache: Tensor, kv_scales: KVScales | None
) -> bool:
    """Returns whether kernels can attend whose warps either copy or multiply: on Hopper, to latents
    of DeepSeek's sizes, for which they have memory, in blocks that the copy engine can bring."""
    size = kv_cache.element_size()
    block_stride, token_stride, _ = kv_cache.stride()
    return (
        q_latent.element_size() == 2
        and (kv_scales is not None or kv_cache.dtype == q_latent.dtype)
        and (q_latent.shape[2], q_rope.shape[2]) == (512, 64)
        and has_warpgroup_mma(q_latent.device)
        and kv_cache.shape[1] % FEWEST_OF_BOX == 0
        and block_stride * size % 16 == token_stride * size % 16 == kv_cache.data_ptr() % 16 == 0
    )


def tuning_of(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    kv_scales: KVScales | None,
) -> LatentDecodeTuning:
    """Chooses for the decodes of a step, with queries [T, H, L]."""
    device = q_latent.device
    return latent_decode_tuning(
        device,
        q_latent.shape[1] * metadata.decode_query_len,
        q_latent.element_size(),
        metadata.num_decodes,
        turns=has_warpgroup_mma(device) and kv_scales is None,
        is_ahead=copies_ahead(q_latent, q_rope, kv_cache, kv_scales),
    )


@triton.jit
def _store_whole(
    out: tl.tensor,
    index: tl.tensor,
    real: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
) -> None:
    """Writes rows `index` of `out` where they are `real`."""
    dim = tl.arange(0, BLOCK_LATENT)
    kept = real[:, None] & (dim < LATENT)[None, :]
    attended = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + index[:, None] * LATENT + dim[None, :], attended, mask=kept)


@triton.jit
def _store_part(
    partial_acc: tl.tensor,
    partial_state: tl.tensor,
    slot: tl.tensor,
    real: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
) -> None:
    """Writes the softmax state of rows that are `real` to a slot."""
    dim = tl.arange(0, BLOCK_LATENT)
    row = slot * ROWS + tl.arange(0, ROWS)
    kept = real[:, None] & (dim < LATENT)[None, :]
    tl.store(partial_acc + row[:, None] * LATENT + dim[None, :], acc, mask=kept)
    state = partial_state + slot * (2 * ROWS) + tl.arange(0, ROWS)
    tl.store(state, peak, mask=real)
    tl.store(state + ROWS, total, mask=real)


@triton.jit(do_not_specialize=["num_reqs"])
def latent_decode_kernel(
    q_latent: tl.tensor,
    q_rope: tl.tensor,
    kv_cache: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    kv_scale: tl.tensor,
    out: tl.tensor,
    partial_acc: tl.tensor,
    partial_state: tl.tensor,
    num_reqs: tl.tensor,
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
    ROW_TILES: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    REQS: tl.constexpr,
    TURNED: tl.constexpr,
    OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    """Walks one run of the line in each program. Writes [T, H, L]; of a context that is cut float32
    parts and their softmax states in slot 0 or 1 of the program, as `decode_attention` does.
    """
    take_turn(OVERLAP)
    program = tl.program_id(0)
    lengths, ends, length = line(seq_lens, num_reqs, ROW_TILES, TILE, REQS, 0)
    run = aligned_run(lengths, tl.cdiv(length, tl.num_programs(0)), TILE)
    here = program * run
    end = tl.minimum(here + run, length)
    if FP8:
        own_scale = tl.load(kv_scale)
        scale = scale * own_scale
    own_row = tl.arange(0, ROWS)
    while here < end:
        r, begin = find(ends, here)
        seq_len = tl.load(seq_lens + r)
        tiles = tl.cdiv(seq_len, TILE)
        row_tile = (here - begin) // tiles
        first_tile = (here - begin) % tiles
        last_tile = tl.minimum(tiles, first_tile + end - here)
        row = row_tile * ROWS + own_row
        token = row // NUM_HEADS
        head = row % NUM_HEADS
        real = token < QUERY_LEN
        at = (r * QUERY_LEN + token).to(tl.int64)
        query, rotated = latent_queries(
            q_latent + at[:, None] * latent_token_stride + head[:, None] * latent_head_stride,
            q_rope + at[:, None] * rope_token_stride + head[:, None] * rope_head_stride,
            real, FP8, LATENT, BLOCK_LATENT, ROPE, BLOCK_ROPE,
        )  # fmt: skip
        peak, total, acc = walk(
            query, rotated, kv_cache, block_tables + r.to(tl.int64) * table_stride,
            first_tile * TILE, tl.minimum(last_tile * TILE, seq_len),
            seq_len - QUERY_LEN + token, block_stride, scale, ROWS, LATENT, BLOCK_LATENT, ROPE,
            BLOCK_ROPE, BLOCK_SIZE, TILE, TURNED, PRECISION, FP8, NATIVE,
        )  # fmt: skip
        if FP8:
            acc = acc * own_scale
        is_whole = (first_tile == 0) & (last_tile == tiles)
        index = at * NUM_HEADS + head
        slot = program.to(tl.int64) * 2 + (first_tile == 0).to(tl.int64)
        if TURNED:
            # By masks: behind a branch, products of the walk wait longer for what they load (8 rows
            # behind 32k tokens: 115 us in place of 86 on an H200). Others are faster by a branch.
            _store_whole(out, index, real & is_whole, total, acc, LATENT, BLOCK_LATENT)
            part = real & (is_whole == 0)
            _store_part(
                partial_acc, partial_state, slot, part, peak, total, acc, ROWS, LATENT, BLOCK_LATENT
            )
        else:
            if is_whole:
                _store_whole(out, index, real, total, acc, LATENT, BLOCK_LATENT)
            else:
                _store_part(
                    partial_acc, partial_state, slot, real, peak, total, acc, ROWS, LATENT,
                    BLOCK_LATENT,
                )  # fmt: skip
        here += last_tile - first_tile


def kernel_of(tuning: LatentDecodeTuning) -> Any:
    """Returns the kernel that attends."""
    if not tuning.ahead:
        return latent_decode_kernel
    return latent_decode_few_kernel if tuning.rows <= MOST_OF_FEW else latent_decode_ahead_kernel


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
    num_decodes, num_rows = metadata.num_decodes, num_heads * metadata.decode_query_len
    tuning = tuning or tuning_of(q_latent, q_rope, kv_cache, metadata, kv_scales)
    programs = num_programs(out.device, tuning.programs_per_sm)
    parts = [
        torch.empty((programs, 2, *size), dtype=torch.float32, device=out.device)
        for size in ((tuning.rows, latent), (2, tuning.rows))
    ]
    shape = {
        "TILE": tuning.tile,
        "REQS": max(16, triton.next_power_of_2(num_decodes)),
        **in_turn(out.device, num_decodes * metadata.decode_query_len),
    }
    sizes = {
        "QUERY_LEN": metadata.decode_query_len,
        "NUM_HEADS": num_heads,
        "ROWS": tuning.rows,
        "ROW_TILES": triton.cdiv(num_rows, tuning.rows),
        "LATENT": latent,
        "ROPE": q_rope.shape[2],
        "BLOCK_SIZE": kv_cache.shape[1],
    }
    if tuning.ahead:
        assert (tuning.rows, tuning.tile) in _AHEAD
        assert tuning.rows <= MOST_OF_FEW or kv_scales is None
        given = q_latent, q_rope, kv_cache, metadata, scale * LOG2_E, out, parts, shape | sizes
        if tuning.rows > MOST_OF_FEW:
            decode_ahead(*given)
        else:
            decode_few(*given, pointers(kv_scales)[0])
        _join(out, metadata, parts, num_rows, shape)
        return
    numbers = kv_cache if kv_scales is None else kv_cache.view(torch.int16)
    latent_decode_kernel[(programs,)](
        q_latent, q_rope, numbers, metadata.block_tables, metadata.seq_lens,
        pointers(kv_scales)[0], out, *parts, num_decodes, *q_latent.stride()[:2],
        *q_rope.stride()[:2], numbers.stride(0), metadata.block_tables.stride(0), scale * LOG2_E,
        BLOCK_LATENT=triton.next_power_of_2(latent),
        BLOCK_ROPE=max(16, triton.next_power_of_2(q_rope.shape[2])),
        TURNED=tuning.turned,
        PRECISION=precision_of(q_latent),
        FP8=kv_scales is not None,
        NATIVE=has_e4m3(out.device),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **shape,
        **sizes,
    )  # fmt: skip
    _join(out, metadata, parts, num_rows, shape)


def _join(
    out: Tensor,
    metadata: AttentionMetadata,
    parts: Sequence[Tensor],
    num_rows: int,
    shape: dict[str, Any],
) -> None:
    """Joins `parts`, accumulators [P, 2, ROWS, L] and softmax states [P, 2, 2, ROWS], of requests
    with `num_rows` query rows each. `shape`: what both kernels are compiled for."""
    programs, _, tile_rows, latent = parts[0].shape
    row_tiles = triton.cdiv(num_rows, tile_rows)
    units = metadata.num_decodes * row_tiles
    # Not by the number of requests itself: each power of two, `REQS`, has one kernel.
    by_head = units <= FEW_UNITS or shape["REQS"] * row_tiles <= programs
    width = triton.next_power_of_2(latent)
    joins = merge_shape(units, width)
    if units == 1:
        # One row may have a part in each program: all are read at once.
        joins = {"BLOCK_VALUE": min(width, 32), "PARTS": 128}
    shape = shape | joins
    columns = triton.cdiv(latent, shape["BLOCK_VALUE"])
    grid = units if by_head else programs, min(tile_rows, num_rows), columns
    merge_kernel[grid](
        metadata.seq_lens, None, out, *parts, metadata.num_decodes, programs,
        NUM_KV_HEADS=row_tiles,
        GROUP=tile_rows,
        ROWS=num_rows,
        VALUE_DIM=latent,
        WINDOW=0,
        HAS_SINKS=False,
        BY_HEAD=by_head,
        ALIGNED=True,
        num_warps=4,
        **shape,
    )  # fmt: skip
