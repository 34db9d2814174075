"""Attention of long queries over paged contexts: prompts, and chunks behind a cached prefix.

A program owns one tile of query rows of one KV head: BLOCK_Q query tokens times the query heads
that share the head, row m being token m // GROUP and head m % GROUP. It walks the context twice:
without a mask up to where its first token stands, then masked to where its last one does. Tiles
are taken from the end of the batch backwards, so that the longest walks of a prompt start first.
With a window the walk begins where the first token's window does, and all of it is masked.
Decodes that come this way overlap their predecessor, as in `decode_attention`.

On Hopper the unmasked walk loads whole tiles by the copy engine (a tensor descriptor over
[block, row of a block, D]); a tile must lie in one block. The masked walk always uses pointers,
because a block's unwritten tail may hold NaN and must not be loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.attention_sink import with_sink
from tandem_kernels.attention.fp8_cache import in_half
from tandem_kernels.attention.kv_scales import KVScales, pointers
from tandem_kernels.attention.soft_cap import soft_capped
from tandem_kernels.device import has_copy_engine, supports_pdl

LOG2_E = 1.4426950408889634
LONG_CONTEXT = 4096
"""The number of tokens from which larger tiles are faster: by 4 % of a step of 4 x 2048 tokens
behind 8192 each. Below smaller ones are, by 0.7 % of a step of 4 x 2048.
"""


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Says how one shape runs best; found by measurement."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


def prefill_tuning(
    max_rows: int,
    total_rows: int,
    max_context: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
) -> PrefillTuning:
    """Choose by rows, which are query tokens times the query heads of a KV head.

    `max_rows` are those of the longest request, `total_rows` those of all requests and KV heads.
    `max_context`: tokens of the longest context, as far as a window shows them.
    """
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    if row_bytes > 512:
        return PrefillTuning(rows=16 if max_rows <= 16 else 32, tile=16, num_warps=4, num_stages=2)
    if max_rows <= 16:
        return PrefillTuning(rows=16, tile=32, num_warps=4, num_stages=3)
    if row_bytes > 256:
        return PrefillTuning(rows=64, tile=32, num_warps=4, num_stages=2)
    if max_rows <= 64 or total_rows <= 128 * 128:
        return PrefillTuning(rows=64, tile=64, num_warps=4, num_stages=4)
    if max_context >= LONG_CONTEXT and block_size % 128 == 0:
        return PrefillTuning(rows=128, tile=128, num_warps=8, num_stages=5)
    if max_context >= LONG_CONTEXT and block_size % 64 == 0:
        return PrefillTuning(rows=128, tile=64, num_warps=8, num_stages=5)
    return PrefillTuning(rows=128, tile=64, num_warps=4, num_stages=4)


def fixed_tuning(head_dim: int, dtype: torch.dtype) -> PrefillTuning:
    """Returns the same tuning for all shapes of a batch."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    if row_bytes > 512:
        return PrefillTuning(rows=16, tile=16, num_warps=4, num_stages=2)
    if row_bytes > 256:
        return PrefillTuning(rows=64, tile=32, num_warps=4, num_stages=2)
    return PrefillTuning(rows=64, tile=64, num_warps=4, num_stages=4)


@triton.jit
def _advance(
    q: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    position: tl.tensor,
    own_position: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Take keys and values at `position` [TILE] into a softmax state. Those of an FP8 cache become
    float16 first, exactly."""
    kind: tl.constexpr = q.dtype
    keys, values = keys.to(kind), values.to(kind)
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    if CAPPED:
        scores = soft_capped(scores, cap)
    if MASKED:
        seen = position[None, :] <= own_position[:, None]
        if WINDOW > 0:
            seen &= position[None, :] > own_position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(kind), values, acc, input_precision=PRECISION)
    return higher, total, acc


@triton.jit
def _places(
    block_table: tl.tensor,
    start: tl.tensor,
    seq_len: tl.tensor,
    block_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Offsets [TILE] of a head's rows at positions `start` and on."""
    lane = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(block_table + start // BLOCK_SIZE).to(tl.int64)
        return block * block_stride + (start % BLOCK_SIZE + lane) * HEAD_DIM
    position = start + lane
    block = tl.load(block_table + position // BLOCK_SIZE, mask=position < seq_len, other=0)
    return block.to(tl.int64) * block_stride + (position % BLOCK_SIZE) * HEAD_DIM


@triton.jit
def request_of(
    query_start_loc: tl.tensor,
    q_tile: tl.tensor,
    first_req: tl.tensor,
    num_reqs: tl.tensor,
    BLOCK_Q: tl.constexpr,
) -> tl.tensor:
    """Returns the request of a query tile: the last whose tiles begin at or before it.

    Request r's tiles begin at (its first query token) // BLOCK_Q + r, counted from `first_req`:
    at least as many tiles as it needs, known without a prefix sum. Only scalar loads lead to
    the answer, so the compiler knows that it is the same for all threads; after a reduction it
    does not, and the walk over the context takes an eighth longer.
    """
    lo = first_req + 1
    hi = num_reqs
    while lo < hi:
        middle = (lo + hi) // 2
        begin = (tl.load(query_start_loc + middle) - first_req) // BLOCK_Q + middle - first_req
        if begin <= q_tile:
            lo = middle + 1
        else:
            hi = middle
    return lo - 1


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def prefill_attention_kernel(
    q: tl.tensor,
    kv_cache: tl.tensor,
    tiles_of_blocks: tl.tensor,
    block_tables: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    first_req: tl.tensor,
    num_reqs: tl.tensor,
    q_stride: tl.tensor,
    block_stride: tl.tensor,
    value_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes, in program (h, i), the i-th tile from the end of KV head h; spare programs end at
    once.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(0)
    q_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    r = request_of(query_start_loc, q_tile, first_req, num_reqs, BLOCK_Q)
    query_start = tl.load(query_start_loc + r)
    num_tokens = tl.load(query_start_loc + r + 1) - query_start
    first_token = (q_tile - (query_start - first_req) // BLOCK_Q - (r - first_req)) * BLOCK_Q
    if first_token >= num_tokens:
        return
    seq_len = tl.load(seq_lens + r)
    cached = seq_len - num_tokens

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    token = first_token + row // GROUP
    real = ((row < BLOCK_Q * GROUP) & (token < num_tokens))[:, None] & (dim < HEAD_DIM)[None, :]
    query_row = (query_start + token).to(tl.int64)[:, None]
    query_head = head * GROUP + (row % GROUP)[:, None]
    queries = tl.load(
        q + query_row * q_stride + query_head * HEAD_DIM + dim[None, :], mask=real, other=0.0
    )
    if FP8:
        of_keys = tl.load(k_scale + head)
        scale, cap = scale * of_keys, cap / of_keys
        queries = in_half(queries)
    own_position = cached + token
    page = kv_cache + head.to(tl.int64) * head_stride
    table = block_tables + r.to(tl.int64) * table_stride

    peak = tl.full([ROWS], -3.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    seen_by_all = (cached + first_token + 1) // TILE * TILE
    needed = tl.minimum(cached + first_token + BLOCK_Q, seq_len)
    lane = tl.arange(0, TILE)
    real_dim = (dim < HEAD_DIM)[None, :]
    masked_from = seen_by_all
    if WINDOW > 0:
        first_seen = tl.maximum(cached + first_token - WINDOW + 1, 0)
        seen_by_all = 0
        masked_from = first_seen // TILE * TILE
    for start in range(0, seen_by_all, TILE):
        if DESCRIBED:
            block = tl.load(table + start // BLOCK_SIZE)
            line = head * BLOCK_SIZE + start % BLOCK_SIZE
            keys = tiles_of_blocks.load([block, line, 0]).reshape(TILE, BLOCK_DIM)
            line += NUM_KV_HEADS * BLOCK_SIZE
            values = tiles_of_blocks.load([block, line, 0]).reshape(TILE, BLOCK_DIM)
        else:
            place = _places(table, start, seq_len, block_stride, HEAD_DIM, BLOCK_SIZE, TILE)
            places = page + place[:, None] + dim[None, :]
            keys = tl.load(places, mask=real_dim, other=0.0)
            values = tl.load(places + value_stride, mask=real_dim, other=0.0)
        peak, total, acc = _advance(
            queries, peak, total, acc, keys, values, start + lane, own_position, scale, cap,
            False, WINDOW, CAPPED, PRECISION,
        )  # fmt: skip
    for start in range(masked_from, needed, TILE):
        inside = start + lane < seq_len
        if WINDOW > 0:
            inside &= start + lane >= first_seen
        mask = inside[:, None] & real_dim
        place = _places(table, start, seq_len, block_stride, HEAD_DIM, BLOCK_SIZE, TILE)
        places = page + place[:, None] + dim[None, :]
        keys = tl.load(places, mask=mask, other=0.0)
        values = tl.load(places + value_stride, mask=mask, other=0.0)
        peak, total, acc = _advance(
            queries, peak, total, acc, keys, values, start + lane, own_position, scale, cap,
            True, WINDOW, CAPPED, PRECISION,
        )  # fmt: skip
    if HAS_SINKS:
        total = with_sink(total, peak, sinks, head * GROUP + row % GROUP, row >= 0)
    if FP8:
        acc = acc * tl.load(v_scale + head)
    # Requests without a context may come this way as decodes: theirs is zero.
    attended = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    to = (query_row * (NUM_KV_HEADS * GROUP) + query_head) * HEAD_DIM + dim[None, :]
    tl.store(out + to, attended.to(out.dtype.element_ty), mask=real)


def prefill_attention(
    q: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: Tensor,
    tuning: PrefillTuning | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_scales: KVScales | None = None,
    *,
    overlaps: bool = False,
) -> None:
    """Attends for the requests of `metadata` behind its decodes.

    Args:
        q: [T, Hq, D] of the whole step; heads of a token adjacent.
        kv_cache: [N, 2, Hkv, B, D], rows of a head adjacent.
        metadata: The whole step.
        scale: Multiplies the scores.
        out: [T, Hq, D] contiguous; rows of the requests behind the decodes are written.
        tuning: None: the choice for this shape.
        softcap: Bound of the scores; 0: none.
        sinks: [Hq] float32, or None.
        kv_scales: Of a cache of e4m3 numbers; None: it has those of `q`.
        overlaps: The step is short, as one of decodes is: the kernel is launched before its
            predecessor has drained, where the device can.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    group = num_q_heads // num_kv_heads
    first_req, num_reqs = metadata.num_decodes, metadata.seq_lens.shape[0]
    block_dim = triton.next_power_of_2(head_dim)
    tuning = tuning or _tuning_of(q, kv_cache, metadata)
    rows = max(tuning.rows, triton.next_power_of_2(group))
    block_q = rows // group
    most_tiles = triton.cdiv(num_tokens - first_req, block_q) + num_reqs - first_req
    described = metadata.window is None and has_copy_engine(q.device)
    described = described and _can_describe(kv_cache, tuning.tile)
    overlaps = overlaps and supports_pdl(q.device)
    prefill_attention_kernel[(num_kv_heads, most_tiles)](
        q,
        kv_cache,
        describe_tiles(kv_cache, tuning.tile, block_dim) if described else None,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        *pointers(kv_scales),
        sinks,
        out,
        first_req,
        num_reqs,
        *metadata.strides(q, kv_cache),
        scale * LOG2_E,
        softcap / scale,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        BLOCK_SIZE=block_size,
        BLOCK_Q=block_q,
        ROWS=rows,
        TILE=tuning.tile,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        DESCRIBED=described,
        WINDOW=metadata.window or 0,
        CAPPED=softcap > 0,
        HAS_SINKS=sinks is not None,
        FP8=kv_scales is not None,
        OVERLAP=overlaps,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **({"launch_pdl": True} if overlaps else {}),
    )


def _tuning_of(q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> PrefillTuning:
    num_tokens, num_q_heads, head_dim = q.shape
    return prefill_tuning(
        metadata.max_query_len * (num_q_heads // kv_cache.shape[2]),
        (num_tokens - metadata.num_decodes) * num_q_heads,
        min(metadata.max_seq_len, metadata.window or metadata.max_seq_len),
        head_dim,
        q.dtype,
        kv_cache.shape[3],
    )


def _can_describe(kv_cache: Tensor, tile: int) -> bool:
    """Returns whether tiles are in one block each, and rows where the copy engine can begin."""
    *_, block_size, head_dim = kv_cache.shape
    return block_size % tile == 0 and tile >= 64 and head_dim * kv_cache.itemsize % 16 == 0


def describe_tiles(kv_cache: Tensor, tile: int, block_dim: int) -> TensorDescriptor:
    """Describes the cache as [block, row of a block, D], loaded [1, tile, block_dim] at a time.

    The rows of a block are those of all heads' keys, then of all heads' values; columns behind
    D read as zero.
    """
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    shape = [num_blocks, 2 * num_kv_heads * block_size, head_dim]
    strides = [kv_cache.stride(0), head_dim, 1]
    return TensorDescriptor(kv_cache, shape, strides, [1, tile, block_dim])
