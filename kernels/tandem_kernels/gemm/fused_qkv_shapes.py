"""The shapes that the kernel of `fused_qkv` can compute."""

from __future__ import annotations

import torch
from torch import Tensor

_INNER_MULTIPLE = 64
_LEAST_INNER = 256
_HEAD_DIMS = (64, 128)
_TILE_OUTPUTS = 256
"""The heads of a tile are of one kind."""
_ALIGNED_BYTES = 16
"""The copy engine reads rows of x, which must begin so."""


def takes(x: Tensor, weight: Tensor, kv_cache: Tensor) -> bool:
    """Returns whether the kernel takes `x` [T, K] and `weight` [(Hq + 2 Hkv) D, K], whose keys and
    values go to `kv_cache` [N, 2, Hkv, B, D]: half precision, not a cache of fewer bits, whole
    tiles of queries, of keys and of K.
    """
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    num_outputs, inner = weight.shape
    num_keys = num_kv_heads * head_dim
    return (
        len(x) > 0
        and weight.dtype in (torch.float16, torch.bfloat16)
        and x.dtype == weight.dtype == kv_cache.dtype
        and head_dim in _HEAD_DIMS
        and num_keys % _TILE_OUTPUTS == 0
        and num_outputs % _TILE_OUTPUTS == 0
        and inner % _INNER_MULTIPLE == 0
        and inner >= _LEAST_INNER
        and x.stride(1) == 1
        and x.stride(0) * x.element_size() % _ALIGNED_BYTES == 0
        and x.data_ptr() % _ALIGNED_BYTES == 0
        and weight.is_contiguous()
    )
