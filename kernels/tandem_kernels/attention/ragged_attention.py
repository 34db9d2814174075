"""Attention of queries to keys without pages; keys may be wider than values.

A program owns one tile of query tokens of one head and walks its request's keys twice: without a
mask as far as all of its queries see, then masked to where the last one does. Tiles are taken from
the end of the batch backwards, so that the longest walks start first. A key's width is cut into the
largest power of two and the rest, as 192 is into 128 and 64. On Hopper and
later the copy engine loads tiles of the walk without a mask: 8,192 queries attend to 32,768 keys of
192 numbers at 504 TFLOP/s in place of 470 (16 heads, one H200).

Where queries attend to chosen keys alone there is one walk: a bit of each key says whether it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem_kernels.attention.prefill_attention import LOG2_E, request_of
from tandem_kernels.attention.ragged_batch import RaggedBatch
from tandem_kernels.device import has_ample_memory, has_copy_engine

_LOG_2 = 1 / LOG2_E
_LEAST_WIDTH = 16


@triton.jit
def _is_chosen(
    bits: tl.tensor, start: tl.tensor, is_query: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """Returns which keys of the tile at `start` each query has chosen, [BLOCK_Q, TILE]. `bits`:
    pointers to the first word of each query."""
    lane = tl.arange(0, TILE)
    low = tl.load(bits + start // 32, mask=is_query, other=0)
    word = tl.broadcast_to(low[:, None], [low.shape[0], TILE])
    if TILE == 64:
        high = tl.load(bits + start // 32 + 1, mask=is_query, other=0)
        word = tl.where((lane < 32)[None, :], word, high[:, None])
    return (word & (1 << lane % 32)[None, :]) != 0


@triton.jit
def _advance(
    query: tl.tensor,
    query_rest: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    k_line: tl.tensor,
    v_line: tl.tensor,
    described: tl.tuple,
    key_start: tl.tensor,
    head: tl.tensor,
    start: tl.tensor,
    last_seen: tl.tensor,
    bits: tl.tensor,
    is_query: tl.tensor,
    num_keys: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    scale: tl.tensor,
    KEY: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    CHOSEN: tl.constexpr,
    DESCRIBED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Takes the TILE keys from `start` on into a softmax state. DESCRIBED: keys and values are
    loaded by the `described` tiles, in place of lines."""
    position = start + tl.arange(0, TILE)
    inside = (position < num_keys)[:, None]
    row = position.to(tl.int64)[:, None]
    main = tl.arange(0, MAIN)[None, :]
    if DESCRIBED:
        keys = described[0].load([head, key_start + start, 0]).reshape(TILE, MAIN)
    else:
        keys = tl.load(k_line + row * k_stride + main, mask=inside, other=0.0)
    scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
    if REST > 0:
        if DESCRIBED:
            keys = described[1].load([head, key_start + start, MAIN]).reshape(TILE, REST)
        else:
            rest = MAIN + tl.arange(0, REST)[None, :]
            keys = tl.load(k_line + row * k_stride + rest, mask=inside & (rest < KEY), other=0.0)
        scores = tl.dot(query_rest, tl.trans(keys), scores, input_precision=PRECISION)
    scores *= scale
    if CHOSEN:
        scores = tl.where(_is_chosen(bits, start, is_query, TILE), scores, float("-inf"))
    elif MASKED:
        scores = tl.where(position[None, :] <= last_seen[:, None], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weights, axis=1)
    if DESCRIBED:
        values = described[2].load([head, key_start + start, 0]).reshape(TILE, BLOCK_VALUE)
    else:
        dim = tl.arange(0, BLOCK_VALUE)[None, :]
        values = tl.load(v_line + row * v_stride + dim, mask=inside & (dim < VALUE), other=0.0)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return higher, total, acc


@triton.jit(
    do_not_specialize=["num_reqs", "log_sums_stride", "bits_stride"],
    do_not_specialize_on_alignment=["query_bounds", "key_bounds"],
)
def ragged_attention_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_tiles: tl.tensor,
    rest_tiles: tl.tensor,
    v_tiles: tl.tensor,
    query_bounds: tl.tensor,
    key_bounds: tl.tensor,
    chosen_bits: tl.tensor,
    out: tl.tensor,
    log_sums: tl.tensor,
    num_reqs: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_stride: tl.tensor,
    v_head_stride: tl.tensor,
    log_sums_stride: tl.tensor,
    bits_stride: tl.tensor,
    scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHOSEN: tl.constexpr,
    DESCRIBED: tl.constexpr,
    PRECISION: tl.constexpr,
    LOG_2: tl.constexpr,
) -> None:
    """Computes, in program (h, i), the i-th tile from the end of head h."""
    head = tl.program_id(0)
    q_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    r = request_of(query_bounds, q_tile, 0, num_reqs, BLOCK_Q)
    query_start = tl.load(query_bounds + r)
    num_queries = tl.load(query_bounds + r + 1) - query_start
    first = (q_tile - query_start // BLOCK_Q - r) * BLOCK_Q
    if first >= num_queries:
        return
    key_start = tl.load(key_bounds + r)
    num_keys = tl.load(key_bounds + r + 1) - key_start
    query = first + tl.arange(0, BLOCK_Q)
    is_query = query < num_queries
    real = is_query[:, None]
    at = (query_start + query).to(tl.int64)
    line = q + at[:, None] * q_stride + head * q_head_stride
    main = tl.load(line + tl.arange(0, MAIN)[None, :], mask=real, other=0.0)
    rest = main
    if REST > 0:
        column = MAIN + tl.arange(0, REST)[None, :]
        rest = tl.load(line + column, mask=real & (column < KEY), other=0.0)
    k_line = k + key_start.to(tl.int64) * k_stride + head * k_head_stride
    v_line = v + key_start.to(tl.int64) * v_stride + head * v_head_stride

    last_seen = tl.zeros([BLOCK_Q], tl.int32) + num_keys - 1
    seen_by_all = num_keys // TILE * TILE
    needed = num_keys
    if CAUSAL:
        before = num_keys - num_queries
        last_seen = before + query
        seen_by_all = tl.maximum(tl.minimum(before + first + 1, num_keys), 0) // TILE * TILE
        needed = tl.minimum(before + first + BLOCK_Q, num_keys)
    last_seen = tl.minimum(last_seen, num_keys - 1)
    peak = tl.full([BLOCK_Q], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_VALUE], tl.float32)
    bits = at
    described = k_tiles, rest_tiles, v_tiles
    if CHOSEN:
        bits = chosen_bits + at * bits_stride
        seen_by_all = num_keys * 0
    else:
        for start in range(0, seen_by_all, TILE):
            peak, total, acc = _advance(
                main, rest, peak, total, acc, k_line, v_line, described, key_start, head, start,
                last_seen, bits, is_query, num_keys, k_stride, v_stride, scale, KEY, MAIN, REST,
                VALUE, BLOCK_VALUE, TILE, False, False, DESCRIBED, PRECISION,
            )  # fmt: skip
    for start in range(seen_by_all, needed, TILE):
        peak, total, acc = _advance(
            main, rest, peak, total, acc, k_line, v_line, described, key_start, head, start,
            last_seen, bits, is_query, num_keys, k_stride, v_stride, scale, KEY, MAIN, REST,
            VALUE, BLOCK_VALUE, TILE, True, CHOSEN, False, PRECISION,
        )  # fmt: skip
    attended = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    dim = tl.arange(0, BLOCK_VALUE)[None, :]
    to = out + (at * NUM_HEADS + head)[:, None] * VALUE + dim
    tl.store(to, attended.to(out.dtype.element_ty), mask=real & (dim < VALUE))
    log_sum = tl.where(total > 0.0, peak * LOG_2 + tl.log(total), float("-inf"))
    tl.store(log_sums + head * log_sums_stride + at, log_sum, mask=is_query)


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: RaggedBatch,
    scale: float,
    chosen_bits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.ragged.ragged_attention`. Numbers of a head are adjacent."""
    num_tokens, num_heads, key = q.shape
    value = v.shape[2]
    out = torch.empty((num_tokens, num_heads, value), dtype=q.dtype, device=q.device)
    log_sums = torch.empty((num_heads, num_tokens), dtype=torch.float32, device=q.device)
    num_reqs = len(batch.query_bounds) - 1
    main = 1 << (key.bit_length() - 1)
    rest = key - main
    is_half = q.element_size() == 2
    block_q = 128 if is_half else 32
    tile, stages = (64, 3 if has_ample_memory(q.device) else 2) if is_half else (32, 1)
    tiles = triton.cdiv(num_tokens, block_q) + num_reqs
    widths = (
        main,
        max(_LEAST_WIDTH, triton.next_power_of_2(rest)) if rest else 0,
        max(_LEAST_WIDTH, triton.next_power_of_2(value)),
    )
    described = None if chosen_bits is not None else _described(k, v, tile, widths)
    ragged_attention_kernel[(num_heads, tiles)](
        q,
        k,
        v,
        *(described or (None, None, None)),
        batch.query_bounds,
        batch.key_bounds,
        chosen_bits,
        out,
        log_sums,
        num_reqs,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        num_tokens,
        0 if chosen_bits is None else chosen_bits.stride(0),
        scale * LOG2_E,
        NUM_HEADS=num_heads,
        KEY=key,
        MAIN=main,
        REST=widths[1],
        VALUE=value,
        BLOCK_VALUE=widths[2],
        BLOCK_Q=block_q,
        TILE=tile,
        CAUSAL=batch.causal,
        CHOSEN=chosen_bits is not None,
        DESCRIBED=described is not None,
        PRECISION="tf32" if is_half else "ieee",
        LOG_2=_LOG_2,
        num_warps=8 if is_half else 4,
        num_stages=stages,
    )
    return out, log_sums


def _described(
    k: Tensor, v: Tensor, tile: int, widths: tuple[int, int, int]
) -> tuple[TensorDescriptor | None, ...] | None:
    """Returns how the copy engine loads tiles of keys, of the rest of their width, and of values,
    as [head, row, number], if there is one and rows of all heads begin where it can."""
    if not has_copy_engine(k.device) or k.element_size() != 2 or not len(k):
        return None
    if any(size * 2 % 16 for one in (k, v) for size in (*one.stride()[:2], one.storage_offset())):
        return None
    main, rest, value = (
        TensorDescriptor(
            one, [one.shape[1], len(one), one.shape[2]], [one.stride(1), one.stride(0), 1],
            [1, tile, width],
        )
        if width
        else None
        for one, width in zip((k, k, v), widths, strict=True)
    )  # fmt: skip
    return main, rest, value
