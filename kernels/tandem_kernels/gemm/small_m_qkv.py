"""Attention's front for the rows of a decode step: q, k, v, rotary embedding and KV cache in one
small-M GEMM.

A program has some outputs of the first half of a head and their partners in the second half, so it
rotates them by itself; of heads whose inner dimension is cut, the last program to end does. What is
rotated has not been rounded before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import supports_pdl
from tandem_kernels.gemm.cache_lines import cache_lines
from tandem_kernels.gemm.small_m_gemm import MOST_TILES, small_m_tuning
from tandem_kernels.gemm.small_m_shapes import tile_rows
from tandem_kernels.part_sums import sum_of_parts
from tandem_kernels.stream_lanes import lane_counters


@triton.jit(do_not_specialize=["num_rows"])
def small_m_qkv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    positions: tl.tensor,
    cos_sin_cache: tl.tensor,
    kv_cache: tl.tensor,
    slot_mapping: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    tickets: tl.tensor,
    num_rows: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    block_stride: tl.tensor,
    value_stride: tl.tensor,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes, in program (j, p), part p of pairs j * PAIRS and on, counted through all heads, the
    query's first, then the keys', then the values'. `parts`: [SPLITS, num_rows, outputs] float32;
    `tickets`: zero for each j, before and behind."""
    programs_of_head: tl.constexpr = HALF // PAIRS
    width: tl.constexpr = (NUM_Q_HEADS + 2 * NUM_KV_HEADS) * 2 * HALF
    head = tl.program_id(0) // programs_of_head
    start = tl.program_id(0) % programs_of_head * PAIRS
    side = tl.arange(0, 2 * PAIRS)
    col = head * (2 * HALF) + start + side % PAIRS + side // PAIRS * HALF
    rows_of_weight = weight + col.to(tl.int64) * inner
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.arange(0, ROWS)
    is_real = row < num_rows
    position = tl.load(positions + row, mask=is_real, other=0)
    slot = tl.load(slot_mapping + row, mask=is_real & (head >= NUM_Q_HEADS), other=-1)
    if OVERLAP:
        gdc_wait()
    lane = tl.arange(0, DEPTH)
    inputs = x + row[:, None] * x_stride
    acc = tl.zeros([ROWS, 2 * PAIRS], tl.float32)
    steps = tl.cdiv(inner // DEPTH, SPLITS) * DEPTH
    first_step = tl.program_id(1) * steps
    for begin in range(first_step, tl.minimum(first_step + steps, inner), DEPTH):
        k = begin + lane
        given = tl.load(inputs + k[None, :], mask=is_real[:, None], other=0.0)
        acc = tl.dot(given, tl.trans(tl.load(rows_of_weight[:, None] + k[None, :])), acc)
    if SPLITS > 1:
        apart = num_rows * width
        to = parts + row[:, None] * width + col[None, :]
        tl.store(to + tl.program_id(1) * apart, acc, mask=is_real[:, None])
        tl.debug_barrier()
        ticket = tickets + tl.program_id(0)
        if tl.atomic_add(ticket, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(ticket, 0)
        acc = sum_of_parts(to, apart, is_real[:, None], SPLITS)
    if HAS_BIAS:
        acc += tl.load(bias + col).to(tl.float32)[None, :]
    pair = start + tl.arange(0, PAIRS)
    turns = is_real & (head < NUM_Q_HEADS + NUM_KV_HEADS)
    angle = cos_sin_cache + position[:, None] * (2 * HALF) + pair[None, :]
    cos = tl.load(angle, mask=turns[:, None], other=1.0)
    sin = tl.load(angle + HALF, mask=turns[:, None], other=0.0)
    first, second = tl.split(acc.reshape(ROWS, 2, PAIRS).permute(0, 2, 1))
    kind: tl.constexpr = out.dtype.element_ty
    left = (first * cos - second * sin).to(kind)
    right = (second * cos + first * sin).to(kind)
    to = out + row[:, None] * width + head * (2 * HALF) + pair[None, :]
    tl.store(to, left, mask=is_real[:, None])
    tl.store(to + HALF, right, mask=is_real[:, None])
    if head >= NUM_Q_HEADS:
        line = cache_lines(
            kv_cache, slot, head, block_stride, value_stride,
            NUM_Q_HEADS, NUM_KV_HEADS, 2 * HALF, BLOCK_SIZE,
        )  # fmt: skip
        to = line[:, None] + pair[None, :]
        tl.store(to, left, mask=(slot >= 0)[:, None])
        tl.store(to + HALF, right, mask=(slot >= 0)[:, None])


def small_m_qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """See `reference.gemm.small_m_qkv`; only for what `small_m_shapes.takes_heads` says."""
    num_rows, inner = x.shape
    num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
    num_heads = len(weight) // head_dim
    out = torch.empty((num_rows, num_heads, head_dim), dtype=x.dtype, device=x.device)
    tuning = small_m_tuning(x.device, False, num_rows, *weight.shape)
    overlap = supports_pdl(x.device)
    parts = tickets = None
    if tuning.splits > 1:
        parts = x.new_empty((tuning.splits, num_rows, len(weight)), dtype=torch.float32)
        tickets = lane_counters("small_m_gemm", MOST_TILES, x.device)
    small_m_qkv_kernel[(len(weight) // tuning.cols, tuning.splits)](
        x,
        weight,
        bias,
        positions,
        cos_sin_cache,
        kv_cache,
        slot_mapping,
        out,
        parts,
        tickets,
        num_rows,
        inner,
        x.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        NUM_Q_HEADS=num_heads - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_SIZE=block_size,
        ROWS=tile_rows(num_rows),
        PAIRS=tuning.cols // 2,
        DEPTH=tuning.depth,
        SPLITS=tuning.splits,
        HAS_BIAS=bias is not None,
        OVERLAP=overlap,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **({"launch_pdl": True} if overlap else {}),
    )
    return out
