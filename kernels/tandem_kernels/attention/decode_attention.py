"""Attention of one query token per request over its paged context.

All KV tiles of the batch form one line: request by request, head by head, position by position.
A fixed number of programs cut the line into equal runs, so the grid depends on nothing but the
device, every program streams the same number of bytes, and lengths are read on the device:

    request 0                    request 1          request 2
    |head 0    |head 1    |      |head 0 |head 1 |  |h0|h1|
    |-----------------|-----------------|-----------------|
      program 0         program 1         program 2

A program that owns a whole (request, head) writes its output. A cut one leaves a partial softmax
state in its slot 0 (a run that begins inside a head) or slot 1 (a run that ends inside one). The
last program of a head to end joins them (`decode_join`); of few requests, whose heads have many
parts, a launch behind this one does (`decode_merge`). The query heads that share a KV head are the
rows of one tile: each byte of the cache is read once.

Where there are programs enough, stretches of heads are padded to whole runs, so that a program has
tiles of one head alone: at the next one it would wait for memory anew.

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
from tandem_kernels.attention.decode_join import (
    join_behind_others,
    leave_part,
    parts_at_once,
    zero_without_context,
)
from tandem_kernels.attention.decode_line import find, line, runs, skipped
from tandem_kernels.attention.decode_merge import FEW_UNITS, merge_kernel, merge_shape
from tandem_kernels.attention.decode_tuning import DecodeTuning, decode_tuning
from tandem_kernels.attention.fp8_cache import in_half, unpacked
from tandem_kernels.attention.head_planes import planes_of_head
from tandem_kernels.attention.kv_pages import PagedKV, PageSizes, first_of, sizes_of
from tandem_kernels.attention.kv_scales import KVScales, pointers
from tandem_kernels.attention.soft_cap import soft_capped
from tandem_kernels.device import has_e4m3, num_programs, supports_pdl
from tandem_kernels.product_precision import precision_of
from tandem_kernels.stream_lanes import lane_counters

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


@triton.jit
def _load_group(
    heads: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Loads GROUP heads of WIDTH numbers each as [ROWS, BLOCK]."""
    row, dim = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    return tl.load(heads + row * WIDTH + dim, mask=(row < GROUP) & (dim < WIDTH), other=0.0)


@triton.jit
def _store_group(
    heads: tl.tensor,
    numbers: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Stores [ROWS, BLOCK] as GROUP heads of WIDTH numbers each."""
    row, dim = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    kept = (row < GROUP) & (dim < WIDTH)
    tl.store(heads + row * WIDTH + dim, numbers.to(heads.dtype.element_ty), mask=kept)


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
    tickets: tl.tensor,
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
    JOINED: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes one run of the line in each program. AHEAD: its first tile is asked for before the
    kernel in front has ended. JOINED: the last program of a cut head to end joins its parts, which
    `tickets` count: zero for each program, before and behind."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    lengths, ends, length = line(seq_lens, num_reqs, NUM_KV_HEADS, TILE, REQS, WINDOW)
    run, step, ends, length = runs(
        lengths, ends, length, programs, NUM_KV_HEADS, TILE, WINDOW, EVEN=JOINED
    )
    if AHEAD:
        keys, values, older, own, own_value, has_newest = ask_ahead(
            kv_cache, block_tables, seq_lens, ends, program * run, length, step,
            block_stride, value_stride, head_stride, table_stride,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, VALUE_DIM, BLOCK_VALUE, BLOCK_SIZE, TILE, WINDOW,
        )  # fmt: skip
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if JOINED:
        width: tl.constexpr = NUM_KV_HEADS * GROUP * VALUE_DIM
        zero_without_context(
            out, lengths, num_reqs, program, programs, seq_lens, width, BLOCK_VALUE, REQS
        )
    here = program * run
    end = tl.minimum(here + run, length)
    while here < end:
        r, begin = find(ends, here)
        seq_len = tl.load(seq_lens + r)
        first = skipped(seq_len, TILE, WINDOW)
        tiles = tl.cdiv(seq_len, TILE) - first
        stretch = tl.cdiv(tiles, step) * step
        head = (here - begin) // stretch
        first_tile = (here - begin) % stretch
        last_tile = tl.minimum(tiles, first_tile + end - here)
        own_scale, own_cap = scale, cap
        if FP8:
            of_keys = tl.load(k_scale + head)
            own_scale, own_cap = scale * of_keys, cap / of_keys
        queries = q + r.to(tl.int64) * q_stride + head * (GROUP * HEAD_DIM)
        query = _load_group(queries, GROUP, ROWS, HEAD_DIM, BLOCK_DIM)
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
                row = tl.arange(0, ROWS)
                total = with_sink(total, peak, sink_of(sinks, head * GROUP + row, row < GROUP))
            heads = out + (r.to(tl.int64) * NUM_KV_HEADS + head) * (GROUP * VALUE_DIM)
            _store_group(heads, acc / total[:, None], GROUP, ROWS, VALUE_DIM, BLOCK_VALUE)
        else:
            slot = program * 2 + (first_tile == 0).to(tl.int32)
            leave_part(
                partial_acc, partial_state, slot, peak, total, acc, GROUP, ROWS, VALUE_DIM,
                BLOCK_VALUE,
            )  # fmt: skip
            if JOINED:
                begin += head * stretch
                join_behind_others(
                    out + r.to(tl.int64) * width, partial_acc, partial_state, tickets, sinks,
                    begin // run, (begin + tiles - 1) // run, head * GROUP,
                    GROUP, HEADS, VALUE_DIM, BLOCK_VALUE, HAS_SINKS, PARTS,
                )  # fmt: skip
        here += tl.minimum(stretch - first_tile, end - here)


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
    parts = _parts(programs, group, sizes.value_dim, q.device)
    shape = _shape(q, sizes, metadata, tuning, is_fp8=is_fp8)
    shape["HAS_SINKS"] = sinks is not None
    numbers = kv_cache.view(torch.int16) if is_fp8 else kv_cache
    heads, whole = triton.next_power_of_2(group), shape["BLOCK_VALUE"]
    decode_attention_kernel[(programs,)](
        q, first_of(numbers), metadata.block_tables, metadata.seq_lens, *pointers(kv_scales), sinks,
        out, *parts, None if few else lane_counters("decode_attention", programs, q.device),
        num_reqs, *metadata.strides(q, numbers), scale * LOG2_E, softcap / scale,
        BLOCK_SIZE=sizes.block_size,
        ROWS=max(16, heads),
        CAPPED=softcap > 0,
        PRECISION=precision_of(q),
        FP8=is_fp8,
        NATIVE=has_e4m3(q.device),
        AHEAD=few and not is_fp8,
        JOINED=not few,
        HEADS=heads,
        PARTS=parts_at_once(heads, whole),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        HEAD_DIM=head_dim,
        BLOCK_DIM=_padded(head_dim, is_fp8=is_fp8),
        **shape,
    )  # fmt: skip
    if few:
        shape |= merge_shape(num_units, whole)
        grid = num_units, group, triton.cdiv(whole, shape["BLOCK_VALUE"])
        merge_kernel[grid](
            metadata.seq_lens, sinks, out, *parts, num_reqs, programs,
            ROWS=num_q_heads,
            BY_HEAD=True,
            ALIGNED=False,
            num_warps=4,
            **shape,
        )  # fmt: skip


def _parts(programs: int, group: int, value_dim: int, device: torch.device) -> list[Tensor]:
    """Returns memory for accumulators [programs, 2, group, Dv] and softmax states [programs, 2, 2,
    group]."""
    sizes = (programs, 2, group, value_dim), (programs, 2, 2, group)
    return [torch.empty(size, dtype=torch.float32, device=device) for size in sizes]


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
