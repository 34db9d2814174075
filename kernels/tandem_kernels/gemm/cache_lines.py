"""Finds the lines of the KV cache to which a GEMM of queries, keys and values writes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cache_lines(
    kv_cache: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    block_stride: tl.tensor,
    value_stride: tl.tensor,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """Returns where the numbers of `head`, of keys or values, begin in each of the slots [rows].
    Heads are counted through queries, keys and values."""
    kv_head = head - NUM_Q_HEADS
    page = kv_cache + slot // BLOCK_SIZE * block_stride
    if kv_head >= NUM_KV_HEADS:
        kv_head -= NUM_KV_HEADS
        page += value_stride
    return page + (kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
