"""Attention of long queries over paged contexts: prompts, and chunks behind a cached prefix.

A program owns one tile of query rows of one KV head: BLOCK_Q query tokens times the query heads
that share the head, row m being token m // GROUP and head m % GROUP. It walks the context twice:
without a mask up to where its first token stands, then masked to where its last one does. Tiles
are taken from the end of the batch backwards, so that the longest walks of a prompt start first.
With a window the walk begins where the first token's window does, and all of it is masked.
Where tiles are too few for the device, as of a question behind a long conversation, contexts are
cut into parts, each walked by a program of its own (`prefill_parts`).
Decodes that come this way overlap their predecessor, as in `decode_attention`.

On Hopper the unmasked walk loads whole tiles by the copy engine (a tensor descriptor over
[block, row of a block, D]); a tile must lie in one block. The masked walk always uses pointers,
because a block's unwritten tail may hold NaN and must not be loaded.

Sources: Dao, FlashAttention-2 (arXiv 2307.08691); Kwon et al., PagedAttention (arXiv 2309.06180).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.attention_sink import sink_of, with_sink
from tandem_kernels.attention.described_tiles import described_tiles
from tandem_kernels.attention.fp8_cache import in_half
from tandem_kernels.attention.head_planes import planes_of_head
from tandem_kernels.attention.kv_pages import PagedKV, first_of, sizes_of
from tandem_kernels.attention.kv_scales import KVScales, pointers
from tandem_kernels.attention.prefill_parts import (
    PartsKept,
    joined,
    num_parts,
    own_walk,
)
from tandem_kernels.attention.prefill_tuning import PrefillTuning, prefill_tuning
from tandem_kernels.attention.soft_cap import soft_capped
from tandem_kernels.device import has_warpgroup_mma, supports_pdl
from tandem_kernels.product_precision import precision_of

LOG2_E = 1.4426950408889634


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
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Returns where the blocks of positions `start` and on begin, and which rows of a block they
    are."""
    lane = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(block_table + start // BLOCK_SIZE)
        row = start % BLOCK_SIZE + lane
    else:
        position = start + lane
        block = tl.load(block_table + position // BLOCK_SIZE, mask=position < seq_len, other=0)
        row = position % BLOCK_SIZE
    return block.to(tl.int64) * block_stride, row


@triton.jit
def _whole_tiles(
    tiles_of_blocks: tl.tensor,
    keys_at: tl.tensor,
    values_at: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    head: tl.tensor,
    seq_len: tl.tensor,
    block_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DESCRIBED: tl.constexpr,
) -> tl.tensor:
    """Returns a head's keys [TILE, BLOCK_DIM] and values [TILE, BLOCK_VALUE] at positions that are
    all written."""
    if DESCRIBED:
        block = tl.load(table + start // BLOCK_SIZE)
        line = head * BLOCK_SIZE + start % BLOCK_SIZE
        keys = tiles_of_blocks.load([block, line, 0]).reshape(TILE, BLOCK_DIM)
        line += NUM_KV_HEADS * BLOCK_SIZE
        values = tiles_of_blocks.load([block, line, 0]).reshape(TILE, BLOCK_VALUE)
    else:
        dim, value_dim = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
        block, row = _places(table, start, seq_len, block_stride, BLOCK_SIZE, TILE)
        places = keys_at + (block + row * HEAD_DIM)[:, None] + dim[None, :]
        keys = tl.load(places, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        places = values_at + (block + row * VALUE_DIM)[:, None] + value_dim[None, :]
        values = tl.load(places, mask=(value_dim < VALUE_DIM)[None, :], other=0.0)
    return keys, values


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
    k_scale: tl.tensor, v_scale: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    partial_acc: tl.tensor,
    partial_state: tl.tensor,
    arrived: tl.tensor,
    first_req: tl.tensor, num_reqs: tl.tensor,
    q_stride: tl.tensor,
    block_stride: tl.tensor, value_stride: tl.tensor,
    head_stride: tl.tensor, table_stride: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
    IN_PARTS: tl.constexpr,
) -> None:  # fmt: skip
    """Computes, in program (h, i, p), part p of the i-th tile from the end of KV head h."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(0)
    q_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    r = request_of(query_start_loc, q_tile, first_req, num_reqs, BLOCK_Q)
    query_start = tl.load(query_start_loc + r)
    num_tokens = tl.load(query_start_loc + r + 1) - query_start
    first_token = (q_tile - (query_start - first_req) // BLOCK_Q - (r - first_req)) * BLOCK_Q
    if (first_token < 0) | (first_token >= num_tokens):  # before the request's rows, or behind
        return
    seq_len = tl.load(seq_lens + r)
    cached = seq_len - num_tokens
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    token = first_token + row // GROUP
    real = ((row < BLOCK_Q * GROUP) & (token < num_tokens))[:, None] & (dim < HEAD_DIM)[None, :]
    query_row = (query_start + token).to(tl.int64)[:, None]
    query_head = head * GROUP + (row % GROUP)[:, None]
    of_query = query_row * q_stride + query_head * HEAD_DIM + dim[None, :]
    queries = tl.load(q + of_query, mask=real, other=0.0)
    if FP8:
        of_keys = tl.load(k_scale + head)
        scale, cap = scale * of_keys, cap / of_keys
        queries = in_half(queries)
    own_position = cached + token
    keys_at, values_at = planes_of_head(
        kv_cache, head, head_stride, value_stride, HEAD_DIM, VALUE_DIM
    )
    table = block_tables + r.to(tl.int64) * table_stride

    peak = tl.full([ROWS], -3.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_VALUE], tl.float32)
    value_dim = tl.arange(0, BLOCK_VALUE)
    seen_by_all = (cached + first_token + 1) // TILE * TILE
    begin, end = 0, tl.minimum(cached + first_token + BLOCK_Q, seq_len)
    lane = tl.arange(0, TILE)
    masked_from = seen_by_all
    if WINDOW > 0:
        first_seen = tl.maximum(cached + first_token - WINDOW + 1, 0)
        seen_by_all = 0
        masked_from = first_seen // TILE * TILE
    if IN_PARTS:
        begin, end, parts = own_walk(tl.program_id(2), end, tl.num_programs(2), TILE)
        if (begin >= end) & (tl.program_id(2) > 0):
            return
    for start in range(begin, tl.minimum(seen_by_all, end), TILE):
        keys, values = _whole_tiles(
            tiles_of_blocks, keys_at, values_at, table, start, head, seq_len, block_stride,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, VALUE_DIM, BLOCK_VALUE, BLOCK_SIZE, TILE, DESCRIBED,
        )  # fmt: skip
        peak, total, acc = _advance(
            queries, peak, total, acc, keys, values, start + lane, own_position, scale, cap,
            False, WINDOW, CAPPED, PRECISION,
        )  # fmt: skip
    for start in range(tl.maximum(masked_from, begin), end, TILE):
        inside = start + lane < seq_len
        if WINDOW > 0:
            inside &= start + lane >= first_seen
        block, line = _places(table, start, seq_len, block_stride, BLOCK_SIZE, TILE)
        places = keys_at + (block + line * HEAD_DIM)[:, None] + dim[None, :]
        keys = tl.load(places, mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        places = values_at + (block + line * VALUE_DIM)[:, None] + value_dim[None, :]
        mask = inside[:, None] & (value_dim < VALUE_DIM)[None, :]
        values = tl.load(places, mask=mask, other=0.0)
        peak, total, acc = _advance(
            queries, peak, total, acc, keys, values, start + lane, own_position, scale, cap,
            True, WINDOW, CAPPED, PRECISION,
        )  # fmt: skip
    if IN_PARTS:
        tile = q_tile * NUM_KV_HEADS + head
        kept = partial_acc, partial_state, arrived
        is_last, peak, total, acc = joined(*kept, tile, parts, peak, total, acc, ROWS, BLOCK_VALUE)
        if not is_last:
            return
    if HAS_SINKS:
        total = with_sink(total, peak, sink_of(sinks, head * GROUP + row % GROUP, row >= 0))
    if FP8:
        acc = acc * tl.load(v_scale + head)
    # Requests without a context may come this way as decodes: theirs is zero.
    attended = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    to = (query_row * (NUM_KV_HEADS * GROUP) + query_head) * VALUE_DIM + value_dim[None, :]
    written = (row < BLOCK_Q * GROUP) & (token < num_tokens)
    real = written[:, None] & (value_dim < VALUE_DIM)[None, :]
    tl.store(out + to, attended.to(out.dtype.element_ty), mask=real)


def prefill_attention(
    q: Tensor,
    kv_cache: PagedKV,
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
        kv_cache: [N, 2, Hkv, B, D], rows of a head adjacent, or pages.
        metadata: The whole step.
        scale: Multiplies the scores.
        out: [T, Hq, Dv] contiguous; rows of the requests behind the decodes are written.
        tuning: None: the choice for this shape.
        softcap: Bound of the scores; 0: none.
        sinks: [Hq] float32, or None.
        kv_scales: Of a cache of e4m3 numbers; None: it has those of `q`.
        overlaps: The step is short: the kernel is launched before its predecessor has drained.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size, _, value_dim = sizes_of(kv_cache)
    group = num_q_heads // num_kv_heads
    first_req, num_reqs = metadata.num_decodes, metadata.seq_lens.shape[0]
    block_dim = triton.next_power_of_2(head_dim)
    tuning = tuning or tuning_of(q, kv_cache, metadata, fewest_tokens=1 if overlaps else 2)
    rows = max(tuning.rows, triton.next_power_of_2(group))
    tiles = triton.cdiv(num_tokens - first_req, rows // group)
    kept = _room_for_parts(q, kv_cache, metadata, tiles, rows) if tuning.in_parts else PartsKept()
    described = described_tiles(kv_cache, tuning.tile, block_dim, metadata.window)
    overlaps = overlaps and supports_pdl(q.device)
    prefill_attention_kernel[(num_kv_heads, tiles + num_reqs - first_req, kept.num_parts)](
        q, first_of(kv_cache), described, metadata.block_tables, metadata.query_start_loc,
        metadata.seq_lens, *pointers(kv_scales), sinks, out, *kept.tensors, first_req, num_reqs,
        *metadata.strides(q, kv_cache), scale * LOG2_E, softcap / scale,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        VALUE_DIM=value_dim,
        BLOCK_VALUE=triton.next_power_of_2(value_dim),
        BLOCK_SIZE=block_size,
        BLOCK_Q=rows // group,
        ROWS=rows,
        TILE=tuning.tile,
        PRECISION=precision_of(q),
        DESCRIBED=described is not None,
        WINDOW=metadata.window or 0,
        CAPPED=softcap > 0,
        HAS_SINKS=sinks is not None,
        FP8=kv_scales is not None,
        OVERLAP=overlaps,
        IN_PARTS=kept.acc is not None,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **({"launch_pdl": True} if overlaps else {}),
    )  # fmt: skip


def tuning_of(
    q: Tensor, kv_cache: PagedKV, metadata: AttentionMetadata, fewest_tokens: int = 2
) -> PrefillTuning:
    """Returns the choice for the requests of a step behind its decodes. A chunk of one token, which
    is rare, has the tiles of two: it needs no kernel of its own."""
    num_tokens, num_q_heads, head_dim = q.shape
    sizes, context = sizes_of(kv_cache), metadata.usual_seq_len or metadata.max_seq_len
    return prefill_tuning(
        q.device,
        max(metadata.max_query_len, fewest_tokens) * (num_q_heads // sizes.num_kv_heads),
        (num_tokens - metadata.num_decodes) * num_q_heads,
        min(context, metadata.window or context),
        head_dim,
        q.dtype,
        sizes.block_size,
        metadata.window,
        by_warpgroups=has_warpgroup_mma(q.device) and kv_cache.dtype == q.dtype,
    )


def _room_for_parts(
    q: Tensor, kv_cache: PagedKV, metadata: AttentionMetadata, tiles: int, rows: int
) -> PartsKept:
    """Returns room for the parts of a step. `tiles`: of all query tokens, if one request has them;
    each request more has up to one more."""
    if metadata.window is not None:
        return PartsKept()
    num_kv_heads, _, _, value_dim = sizes_of(kv_cache)
    num_tokens = q.shape[0] - metadata.num_decodes
    most_tiles = tiles + metadata.seq_lens.shape[0] - metadata.num_decodes
    parts = num_parts(
        num_kv_heads * max(tiles, num_tokens // metadata.max_query_len),
        num_kv_heads * most_tiles,
        metadata.longest_context(kv_cache),
        q.device,
    )
    block_dim = triton.next_power_of_2(value_dim)
    return PartsKept.of(num_kv_heads * most_tiles, parts, rows, block_dim, q.device)
