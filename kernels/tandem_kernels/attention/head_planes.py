"""Finds where a head's keys and values begin in a page; see `kv_pages`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def planes_of_head(
    kv_cache: tl.tensor,
    head: tl.tensor,
    head_stride: tl.tensor,
    value_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
) -> tl.tensor:
    """Returns pointers to a head's keys and to its values in block 0."""
    keys = kv_cache + head.to(tl.int64) * head_stride
    if HEAD_DIM == VALUE_DIM:
        return keys, keys + value_stride
    value_head_stride = head_stride // HEAD_DIM * VALUE_DIM
    return keys, kv_cache + value_stride + head.to(tl.int64) * value_head_stride
