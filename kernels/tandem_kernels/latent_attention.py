"""Latent attention over a paged cache, absorbed: all heads read the same rows.

A program owns ROWS query rows of one request, tokens times heads, and walks a part of the context.
A row of the cache is loaded once and serves as key and as value. With few rows the context is cut
into SPLITS parts, whose results `latent_merge_kernel` joins; how many depends on shapes alone, so
steps can be recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention_metadata import AttentionMetadata
from tandem_kernels.device import num_programs
from tandem_kernels.prefill_attention import LOG2_E, request_of

MAX_SPLITS = 16


@dataclass(frozen=True, slots=True)
class LatentTuning:
    """Says how one shape runs."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


def latent_tuning(max_query_len: int, itemsize: int) -> LatentTuning:
    """Chooses by the longest query, in tokens."""
    if itemsize > 2:
        return LatentTuning(rows=16, tile=16, num_warps=4, num_stages=1)
    if max_query_len == 1:
        return LatentTuning(rows=16, tile=32, num_warps=4, num_stages=3)
    return LatentTuning(rows=64, tile=32, num_warps=8, num_stages=2)


@triton.jit(do_not_specialize=["num_reqs"])
def latent_attention_kernel(
    q_latent: tl.tensor,
    q_rope: tl.tensor,
    kv_cache: tl.tensor,
    block_tables: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    state: tl.tensor,
    num_reqs: tl.tensor,
    latent_token_stride: tl.tensor,
    latent_head_stride: tl.tensor,
    rope_token_stride: tl.tensor,
    rope_head_stride: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Walks, in program (i, h, s), part s of the context for tile i of the tokens and tile h of the
    heads. Writes [T, H, L], or with SPLITS > 1 float32 [T, H, SPLITS, L] and its softmax state.
    """
    q_tile = tl.program_id(0)
    split = tl.program_id(2)
    r = request_of(query_start_loc, q_tile, 0, num_reqs, BLOCK_Q)
    query_start = tl.load(query_start_loc + r)
    num_tokens = tl.load(query_start_loc + r + 1) - query_start
    first_token = (q_tile - query_start // BLOCK_Q - r) * BLOCK_Q
    if first_token >= num_tokens:
        return
    seq_len = tl.load(seq_lens + r)
    row = tl.arange(0, BLOCK_Q * HEADS)
    token = first_token + row // HEADS
    head = tl.program_id(1) * HEADS + row % HEADS
    real = (token < num_tokens) & (head < NUM_HEADS)
    own_position = seq_len - num_tokens + token
    at = (query_start + token).to(tl.int64)
    dim = tl.arange(0, BLOCK_LATENT)
    rot = tl.arange(0, BLOCK_ROPE)
    is_latent = dim < LATENT
    is_rope = rot < ROPE
    place = q_latent + at[:, None] * latent_token_stride + head[:, None] * latent_head_stride
    query = tl.load(place + dim[None, :], mask=real[:, None] & is_latent[None, :], other=0.0)
    place = q_rope + at[:, None] * rope_token_stride + head[:, None] * rope_head_stride
    turned = tl.load(place + rot[None, :], mask=real[:, None] & is_rope[None, :], other=0.0)

    peak = tl.full([BLOCK_Q * HEADS], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK_Q * HEADS], tl.float32)
    acc = tl.zeros([BLOCK_Q * HEADS, BLOCK_LATENT], tl.float32)
    needed = tl.minimum(seq_len - num_tokens + first_token + BLOCK_Q, seq_len)
    part = tl.cdiv(tl.cdiv(needed, TILE), SPLITS) * TILE
    lane = tl.arange(0, TILE)
    table = block_tables + r.to(tl.int64) * table_stride
    for start in range(split * part, tl.minimum(split * part + part, needed), TILE):
        position = start + lane
        inside = position < needed
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        line = kv_cache + block * block_stride + (position % BLOCK_SIZE) * (LATENT + ROPE)
        mask = inside[:, None] & is_latent[None, :]
        latents = tl.load(line[:, None] + dim[None, :], mask=mask, other=0.0)
        mask = inside[:, None] & is_rope[None, :]
        keys = tl.load(line[:, None] + LATENT + rot[None, :], mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(latents), input_precision=PRECISION)
        scores = tl.dot(turned, tl.trans(keys), scores, input_precision=PRECISION)
        seen = inside[None, :] & (position[None, :] <= own_position[:, None])
        scores = tl.where(seen, scores * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        peak = higher
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(latents.dtype), latents, acc, input_precision=PRECISION)
    writes = real[:, None] & is_latent[None, :]
    index = at * NUM_HEADS + head
    if SPLITS == 1:
        total = tl.where(total > 0.0, total, 1.0)
        attended = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + index[:, None] * LATENT + dim[None, :], attended, mask=writes)
    else:
        index = index * SPLITS + split
        tl.store(out + index[:, None] * LATENT + dim[None, :], acc, mask=writes)
        tl.store(state + index * 2, peak, mask=real)
        tl.store(state + index * 2 + 1, total, mask=real)


@triton.jit
def latent_merge_kernel(
    parts: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Joins the parts of one row in each program."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, BLOCK_LATENT)
    is_latent = dim < LATENT
    of_part = row * SPLITS + split
    peak = tl.load(state + of_part * 2)
    share = tl.exp2(peak - tl.max(peak, axis=0))
    total = tl.sum(share * tl.load(state + of_part * 2 + 1), axis=0)
    place = parts + of_part[:, None] * LATENT + dim[None, :]
    joined = tl.sum(tl.load(place, mask=is_latent[None, :], other=0.0) * share[:, None], axis=0)
    joined = joined / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * LATENT + dim, joined.to(out.dtype.element_ty), mask=is_latent)


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> Tensor:
    """See `reference.latent.latent_attention`."""
    num_tokens, num_heads, latent = q_latent.shape
    out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    num_reqs = metadata.seq_lens.shape[0]
    longest = 2 if metadata.fixed_order else metadata.max_query_len
    tuning = latent_tuning(longest, q_latent.element_size())
    heads = min(tuning.rows, triton.next_power_of_2(num_heads))
    block_q = max(1, tuning.rows // heads)
    tiles = triton.cdiv(num_tokens, block_q) + num_reqs
    head_tiles = triton.cdiv(num_heads, heads)
    splits = 1
    if metadata.max_query_len == 1 and not metadata.fixed_order:
        free = num_programs(q_latent.device, 2) // (num_tokens * head_tiles)
        splits = min(MAX_SPLITS, 1 << max(free.bit_length() - 1, 0))
    target, state = out, None
    if splits > 1:
        target, state = (
            torch.empty(
                (num_tokens, num_heads, splits, width), dtype=torch.float32, device=out.device
            )
            for width in (latent, 2)
        )
    shape = {"LATENT": latent, "BLOCK_LATENT": triton.next_power_of_2(latent), "SPLITS": splits}
    latent_attention_kernel[(tiles, head_tiles, splits)](
        q_latent,
        q_rope,
        kv_cache,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        target,
        state,
        num_reqs,
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
        kv_cache.stride(0),
        metadata.block_tables.stride(0),
        scale * LOG2_E,
        NUM_HEADS=num_heads,
        HEADS=heads,
        ROPE=q_rope.shape[2],
        BLOCK_ROPE=max(16, triton.next_power_of_2(q_rope.shape[2])),
        BLOCK_SIZE=kv_cache.shape[1],
        BLOCK_Q=block_q,
        TILE=tuning.tile,
        PRECISION="ieee" if q_latent.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **shape,
    )
    if state is not None:
        latent_merge_kernel[(num_tokens * num_heads,)](target, state, out, num_warps=4, **shape)
    return out
