"""Latent attention over a paged cache, absorbed: all heads read the same rows.

Decodes go through `latent_decode`. For the others a program owns ROWS query rows of one request,
tokens times heads, and walks its context. A row of the cache is loaded once and serves as key and
as value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_scales import KVScales, pointers
from tandem_kernels.attention.latent_decode import latent_decode
from tandem_kernels.attention.latent_tile import latent_queries, store_attended
from tandem_kernels.attention.latent_walk import walk
from tandem_kernels.attention.prefill_attention import LOG2_E, request_of
from tandem_kernels.device import has_e4m3
from tandem_kernels.product_precision import precision_of
from tandem_kernels.tunings.table import plain_table


@dataclass(frozen=True, slots=True)
class LatentTuning:
    """Says how one shape runs."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


_TABLE = plain_table("latent_attention", LatentTuning, ("itemsize",))


def latent_tuning(device: torch.device, itemsize: int) -> LatentTuning:
    """Chooses by the bytes of a number."""
    return _TABLE.choose(device, itemsize)


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def latent_attention_kernel(
    q_latent: tl.tensor,
    q_rope: tl.tensor,
    kv_cache: tl.tensor,
    block_tables: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    kv_scale: tl.tensor,
    out: tl.tensor,
    first_req: tl.tensor,
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
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    """Walks, in program (h, i), the context for tile i of the tokens, those of the requests from
    `first_req` on, and tile h of the heads.
    """
    q_tile = tl.program_id(1)
    r = request_of(query_start_loc, q_tile, first_req, num_reqs, BLOCK_Q)
    query_start = tl.load(query_start_loc + r)
    num_tokens = tl.load(query_start_loc + r + 1) - query_start
    first_token = (q_tile - (query_start - first_req) // BLOCK_Q - (r - first_req)) * BLOCK_Q
    if (first_token < 0) | (first_token >= num_tokens):  # before the request's rows, or behind
        return
    seq_len = tl.load(seq_lens + r)
    row = tl.arange(0, BLOCK_Q * HEADS)
    token = first_token + row // HEADS
    head = tl.program_id(0) * HEADS + row % HEADS
    real = (token < num_tokens) & (head < NUM_HEADS)
    own_position = seq_len - num_tokens + token
    at = (query_start + token).to(tl.int64)
    query, rotated = latent_queries(
        q_latent + at[:, None] * latent_token_stride + head[:, None] * latent_head_stride,
        q_rope + at[:, None] * rope_token_stride + head[:, None] * rope_head_stride,
        real, FP8, LATENT, BLOCK_LATENT, ROPE, BLOCK_ROPE,
    )  # fmt: skip
    if FP8:
        own_scale = tl.load(kv_scale)
        scale = scale * own_scale
    needed = tl.minimum(seq_len - num_tokens + first_token + BLOCK_Q, seq_len)
    peak, total, acc = walk(
        query, rotated, kv_cache, block_tables + r.to(tl.int64) * table_stride, 0, needed,
        own_position, block_stride, scale, BLOCK_Q * HEADS, LATENT, BLOCK_LATENT, ROPE, BLOCK_ROPE,
        BLOCK_SIZE, TILE, False, PRECISION, FP8, NATIVE,
    )  # fmt: skip
    if FP8:
        acc = acc * own_scale
    index = at * NUM_HEADS + head
    store_attended(out, None, index, 0, real, peak, total, acc, LATENT, BLOCK_LATENT, 1)


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    kv_scales: KVScales | None = None,
) -> Tensor:
    """See `reference.latent.latent_attention`.

    In fixed order all queries go through the kernel of long ones: it walks a context from its
    beginning, and what lies behind a query's own position adds nothing. So do all queries of a step
    in which decodes with drafts come with others. Decodes that a recorded step hides are attended
    first: of other rows that leaves zeros.
    """
    out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    num_others = metadata.seq_lens.shape[0] - metadata.num_decodes
    if metadata.fixed_order or (num_others > 0 and metadata.decode_query_len > 1):
        metadata = replace(metadata, num_decodes=0, decode_query_len=1)
    if (hidden := metadata.hidden) is not None:
        count = len(metadata.seq_lens)
        decodes = replace(metadata, num_decodes=count, seq_lens=hidden.seq_lens)
        latent_decode(q_latent, q_rope, kv_cache, decodes, scale, out, None, kv_scales)
        metadata = replace(metadata, query_start_loc=hidden.query_start_loc)
    if metadata.num_decodes > 0:
        latent_decode(q_latent, q_rope, kv_cache, metadata, scale, out, None, kv_scales)
    if metadata.num_decodes < metadata.seq_lens.shape[0]:
        _attend_others(q_latent, q_rope, kv_cache, metadata, scale, out, kv_scales)
    return out


def _attend_others(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: Tensor,
    kv_scales: KVScales | None,
) -> None:
    """Attends for the requests behind the decodes, which have one token each."""
    num_tokens, num_heads, latent = q_latent.shape
    first_req, num_reqs = metadata.num_decodes, metadata.seq_lens.shape[0]
    tuning = latent_tuning(q_latent.device, q_latent.element_size())
    heads = min(tuning.rows, triton.next_power_of_2(num_heads))
    block_q = max(1, tuning.rows // heads)
    tiles = triton.cdiv(num_tokens - first_req, block_q) + num_reqs - first_req
    numbers = kv_cache if kv_scales is None else kv_cache.view(torch.int16)
    latent_attention_kernel[(triton.cdiv(num_heads, heads), tiles)](
        q_latent,
        q_rope,
        numbers,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        pointers(kv_scales)[0],
        out,
        first_req,
        num_reqs,
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
        numbers.stride(0),
        metadata.block_tables.stride(0),
        scale * LOG2_E,
        NUM_HEADS=num_heads,
        HEADS=heads,
        LATENT=latent,
        BLOCK_LATENT=triton.next_power_of_2(latent),
        ROPE=q_rope.shape[2],
        BLOCK_ROPE=max(16, triton.next_power_of_2(q_rope.shape[2])),
        BLOCK_SIZE=kv_cache.shape[1],
        BLOCK_Q=block_q,
        TILE=tuning.tile,
        PRECISION=precision_of(q_latent),
        FP8=kv_scales is not None,
        NATIVE=has_e4m3(out.device),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
