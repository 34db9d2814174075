"""Attention of one query token per request over its paged context.

All KV tiles of the batch form one line: request by request, head by head, position by position.
A fixed number of programs cut the line into equal runs, so the grid depends on nothing but the
device, every program streams the same number of bytes, and lengths are read on the device:

    request 0                    request 1          request 2
    |head 0    |head 1    |      |head 0 |head 1 |  |h0|h1|
    |-----------------|-----------------|-----------------|
      program 0         program 1         program 2

A program that owns a whole (request, head) writes its output. A cut one leaves a partial softmax
state in its slot 0 (a run that begins inside a head) or slot 1 (a run that ends inside one), which
`decode_merge` joins. The query heads that share a KV head are the rows of one tile: each byte of
the cache is read once.

With a window the line has only the tiles that the window reaches. A sink joins where a softmax
state is complete: in the program that owns a whole head, or in the merge.

On Hopper both kernels launch before their predecessor has drained (programmatic dependent
launch) and wait for its writes where they first need them. Of few requests, programs ask for their
first tile before that: see `decode_ahead`.

Sources: Kwon et al., PagedAttention (arXiv 2309.06180); Dao et al., FlashAttention (arXiv
2205.14135) and Flash-Decoding, whose parts of a context these runs are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.attention_sink import sink_of, with_sink
from tandem_kernels.attention.decode_ahead import ask_ahead, attend_ahead
from tandem_kernels.attention.decode_line import find, line, skipped
from tandem_kernels.attention.decode_merge import FEW_UNITS, merge_kernel, merge_shape
from tandem_kernels.attention.decode_tuning import DecodeTuning, decode_tuning
from tandem_kernels.attention.fp8_cache import in_half, unpacked
from tandem_kernels.attention.head_planes import planes_of_head
from tandem_kernels.attention.kv_pages import PagedKV, PageSizes, first_of, sizes_of
from tandem_kernels.attention.kv_scales import KVScales, pointers
from tandem_kernels.attention.soft_cap import soft_capped
from tandem_kernels.device import has_e4m3, num_programs, supports_pdl
from tandem_kernels.product_precision import precision_of

LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    q: tl.tensor,
    keys_at: tl.tensor,
    values_at: tl.tensor,
    block_table: tl.tensor,
    first_tile: tl.tensor,
    last_tile: tl.tensor,
    seq_len: tl.tensor,
    block_stride: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tl.tensor:
    """Returns the softmax state (peak, sum, accumulator) of `q` [ROWS, BLOCK_DIM] over tiles of one
    head, and over what `peak`, `total` and `acc` are of.

    `keys_at` and `values_at` point at the head in block 0; scores are in powers of two. FP8: at
    pairs of numbers, see `fp8_cache`.
    """
    row_len: tl.constexpr = HEAD_DIM // 2 if FP8 else HEAD_DIM
    width: tl.constexpr = BLOCK_DIM // 2 if FP8 else BLOCK_DIM
    value_len: tl.constexpr = VALUE_DIM // 2 if FP8 else VALUE_DIM
    value_width: tl.constexpr = BLOCK_VALUE // 2 if FP8 else BLOCK_VALUE
    lane = tl.arange(0, TILE)
    dim = tl.arange(0, width)
    value_dim = tl.arange(0, value_width)
    if FP8:
        acc_odd = tl.zeros([ROWS, value_width], tl.float32)
        kind: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16
        q, q_odd = in_half(q).reshape(ROWS, width, 2).split()
    for tile in range(first_tile, last_tile):
        start = tile * TILE
        inside = start + lane < seq_len
        if WINDOW > 0:
            inside &= start + lane >= seq_len - WINDOW
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(block_table + start // BLOCK_SIZE).to(tl.int64)
            offset = start % BLOCK_SIZE + lane
        else:
            position = start + lane
            block = tl.load(block_table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            offset = position % BLOCK_SIZE
        place = block * block_stride + offset * row_len
        mask = inside[:, None] & (dim < row_len)[None, :]
        keys = tl.load(keys_at + place[:, None] + dim[None, :], mask=mask, other=0)
        if FP8:
            keys, keys_odd = unpacked(tl.trans(keys), NATIVE)
            scores = tl.dot(q, keys.to(kind), input_precision=PRECISION)
            scores = tl.dot(q_odd, keys_odd.to(kind), scores, input_precision=PRECISION)
        else:
            scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
        if CAPPED:
            scores = soft_capped(scores, cap)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        shrink = tl.exp2(peak - higher)
        peak = higher
        total = total * shrink + tl.sum(weights, axis=1)
        place = block * block_stride + offset * value_len
        mask = inside[:, None] & (value_dim < value_len)[None, :]
        values = tl.load(values_at + place[:, None] + value_dim[None, :], mask=mask, other=0)
        acc = acc * shrink[:, None]
        if FP8:
            values, values_odd = unpacked(values, NATIVE)
            weights = weights.to(kind)
            acc = tl.dot(weights, values.to(kind), acc, input_precision=PRECISION)
            acc_odd = acc_odd * shrink[:, None]
            acc_odd = tl.dot(weights, values_odd.to(kind), acc_odd, input_precision=PRECISION)
        else:
            acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    if FP8:
        acc = tl.interleave(acc, acc_odd)
    return peak, total, acc


@triton.jit(do_not_specialize=["num_reqs"])
def decode_attention_kernel(
    q: tl.tensor,
    kv_cache: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    partial_acc: tl.tensor,
    partial_state: tl.tensor,
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
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    REQS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes one run of the line in each program. AHEAD: its first tile is asked for before the
    kernel in front has ended."""
    program = tl.program_id(0)
    _, ends, length = line(seq_lens, num_reqs, NUM_KV_HEADS, TILE, REQS, WINDOW)
    run = tl.cdiv(length, tl.num_programs(0))
    if AHEAD:
        keys, values, older, own, own_value, has_newest = ask_ahead(
            kv_cache, block_tables, seq_lens, ends, program * run, length,
            block_stride, value_stride, head_stride, table_stride,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, VALUE_DIM, BLOCK_VALUE, BLOCK_SIZE, TILE, WINDOW,
        )  # fmt: skip
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    here = program * run
    end = tl.minimum(here + run, length)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    value_dim = tl.arange(0, BLOCK_VALUE)
    real = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    kept = (row < GROUP)[:, None] & (value_dim < VALUE_DIM)[None, :]
    while here < end:
        r, begin = find(ends, here)
        seq_len = tl.load(seq_lens + r)
        first = skipped(seq_len, TILE, WINDOW)
        tiles = tl.cdiv(seq_len, TILE) - first
        head = (here - begin) // tiles
        first_tile = (here - begin) % tiles
        last_tile = tl.minimum(tiles, first_tile + end - here)
        query_head = head * GROUP + row[:, None]
        place = r.to(tl.int64) * q_stride + query_head * HEAD_DIM + dim[None, :]
        own_scale, own_cap = scale, cap
        if FP8:
            of_keys = tl.load(k_scale + head)
            own_scale, own_cap = scale * of_keys, cap / of_keys
        query = tl.load(q + place, mask=real, other=0.0)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_VALUE // 2 if FP8 else BLOCK_VALUE], tl.float32)
        walked = first_tile
        if AHEAD:  # noqa: SIM102
            if here == program * run:
                peak, total, acc = attend_ahead(
                    query, keys, values, older, own, own_value, has_newest, own_scale, own_cap,
                    HEAD_DIM, BLOCK_DIM, VALUE_DIM, BLOCK_VALUE, CAPPED, PRECISION, float("-inf"),
                )  # fmt: skip
                walked += 1
        keys_at, values_at = planes_of_head(
            kv_cache, head, head_stride, value_stride, HEAD_DIM, VALUE_DIM
        )
        table = block_tables + r.to(tl.int64) * table_stride
        peak, total, acc = _attend(
            query, keys_at, values_at, table, first + walked, first + last_tile, seq_len,
            block_stride, own_scale, own_cap, peak, total, acc, HEAD_DIM, BLOCK_DIM, VALUE_DIM,
            BLOCK_VALUE, BLOCK_SIZE, ROWS, TILE, WINDOW, CAPPED, PRECISION, FP8, NATIVE,
        )  # fmt: skip
        if FP8:
            acc = acc * tl.load(v_scale + head)
        if (first_tile == 0) & (last_tile == tiles):
            if HAS_SINKS:
                total = with_sink(total, peak, sink_of(sinks, head * GROUP + row, row < GROUP))
            to = (r * NUM_KV_HEADS * GROUP + query_head) * VALUE_DIM + value_dim[None, :]
            tl.store(out + to, (acc / total[:, None]).to(out.dtype.element_ty), mask=kept)
        else:
            slot = program * 2 + (first_tile == 0).to(tl.int32)
            to = (slot * GROUP + row[:, None]) * VALUE_DIM + value_dim[None, :]
            tl.store(partial_acc + to, acc, mask=kept)
            state = partial_state + slot * (2 * GROUP) + row
            tl.store(state, peak, mask=row < GROUP)
            tl.store(state + GROUP, total, mask=row < GROUP)
        here += last_tile - first_tile


def decode_attention(
    q: Tensor,
    kv_cache: PagedKV,
    metadata: AttentionMetadata,
    scale: float,
    out: Tensor,
    tuning: DecodeTuning | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_scales: KVScales | None = None,
) -> None:
    """Attends for one query token of each request.

    Args:
        q: [R, Hq, D], row r belongs to request r of `metadata`; heads of a token adjacent.
        kv_cache: [N, 2, Hkv, B, D], rows of a head adjacent, or pages; widths even.
        metadata: Only block tables, sequence lengths and the window are read.
        scale: Multiplies the scores.
        out: [R, Hq, Dv] contiguous, written completely.
        tuning: None: the choice for this shape.
        softcap: Bound of the scores; 0: none.
        sinks: [Hq] float32, or None.
        kv_scales: Of a cache of e4m3 numbers; None: it has those of `q`.
    """
    num_reqs, num_q_heads, head_dim = q.shape
    sizes = sizes_of(kv_cache)
    num_kv_heads = sizes.num_kv_heads
    num_units, group = num_reqs * num_kv_heads, num_q_heads // num_kv_heads
    # Of few, most programs have one tile or none, and ask for it ahead.
    is_fp8, few = kv_scales is not None, num_units <= FEW_UNITS
    tuning = tuning or decode_tuning(q.device, num_units, head_dim, kv_cache.dtype)
    programs = num_programs(q.device, tuning.programs_per_sm)
    acc_shape, state_shape = (programs, 2, group, sizes.value_dim), (programs, 2, 2, group)
    partial_acc = torch.empty(acc_shape, dtype=torch.float32, device=q.device)
    partial_state = torch.empty(state_shape, dtype=torch.float32, device=q.device)
    shape = _shape(q, sizes, metadata, tuning, is_fp8=is_fp8)
    shape["HAS_SINKS"] = sinks is not None
    numbers = kv_cache.view(torch.int16) if is_fp8 else kv_cache
    decode_attention_kernel[(programs,)](
        q, first_of(numbers), metadata.block_tables, metadata.seq_lens, *pointers(kv_scales), sinks,
        out, partial_acc, partial_state, num_reqs, *metadata.strides(q, numbers), scale * LOG2_E,
        softcap / scale,
        BLOCK_SIZE=sizes.block_size,
        ROWS=max(16, triton.next_power_of_2(group)),
        CAPPED=softcap > 0,
        PRECISION=precision_of(q),
        FP8=is_fp8,
        NATIVE=has_e4m3(q.device),
        AHEAD=few and not is_fp8,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        HEAD_DIM=head_dim,
        BLOCK_DIM=_padded(head_dim, is_fp8=is_fp8),
        **shape,
    )  # fmt: skip
    whole = shape["BLOCK_VALUE"]
    shape |= merge_shape(num_units, whole)
    grid = num_units if few else programs, group, triton.cdiv(whole, shape["BLOCK_VALUE"])
    merge_kernel[grid](
        metadata.seq_lens,
        sinks,
        out,
        partial_acc,
        partial_state,
        num_reqs,
        programs,
        ROWS=num_q_heads,
        BY_HEAD=few,
        ALIGNED=False,
        num_warps=4,
        **shape,
    )


def _shape(
    q: Tensor,
    sizes: PageSizes,
    metadata: AttentionMetadata,
    tuning: DecodeTuning,
    *,
    is_fp8: bool,
) -> dict[str, Any]:
    """Returns what both kernels are compiled for."""
    num_reqs, num_q_heads, _ = q.shape
    return {
        "NUM_KV_HEADS": sizes.num_kv_heads,
        "GROUP": num_q_heads // sizes.num_kv_heads,
        "VALUE_DIM": sizes.value_dim,
        "BLOCK_VALUE": _padded(sizes.value_dim, is_fp8=is_fp8),
        "TILE": tuning.tile,
        "REQS": max(16, triton.next_power_of_2(num_reqs)),
        "WINDOW": metadata.window or 0,
        **({"OVERLAP": True, "launch_pdl": True} if supports_pdl(q.device) else {"OVERLAP": False}),
    }


def _padded(width: int, *, is_fp8: bool) -> int:
    """Returns the columns of a tile that has a head's numbers."""
    padded: int = triton.next_power_of_2(width)
    return max(32 if is_fp8 else 1, padded)
