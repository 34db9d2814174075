"""The shapes that the kernels of `small_m_gemm` can compute."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_ROWS = 64
_INNER_MULTIPLE = 256
OUTPUTS_MULTIPLE = 128
_HEAD_DIMS = (64, 128, 256)
"""A program has pairs of one head."""


def tile_rows(num_rows: int) -> int:
    """Returns the rows of a tile. None has 32: warps multiply these by themselves, four of them 64
    together (wgmma), which takes three quarters of the time."""
    return 16 if num_rows <= 16 else MAX_ROWS


def takes(x: Tensor, weight: Tensor) -> bool:
    """Returns whether the kernel takes `x` [T, K] and `weight` [N, K]: whole tiles, half precision,
    few rows, each in one piece.
    """
    num_outputs, inner = weight.shape
    return (
        0 < len(x) <= MAX_ROWS
        and x.dtype == weight.dtype
        and x.stride(-1) == 1
        and weight.dtype in (torch.float16, torch.bfloat16)
        and inner % _INNER_MULTIPLE == 0
        and num_outputs % OUTPUTS_MULTIPLE == 0
    )


def takes_heads(x: Tensor, weight: Tensor, kv_cache: Tensor) -> bool:
    """Returns whether `small_m_qkv` takes `x` [T, K] and `weight` [(Hq + 2 Hkv) D, K], whose keys
    and values go to `kv_cache` [N, 2, Hkv, B, D], not one of fewer bits."""
    head_dim = kv_cache.shape[-1]
    return takes(x, weight) and kv_cache.dtype == x.dtype and head_dim in _HEAD_DIMS
