"""The shapes that `few_row_gemm`, `few_row_qkv` and `head_gemm` can compute."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.gemm.few_row_warp_shapes import takes_warps
from tandem_kernels.gemm.gemm_thresholds import gemm_thresholds

MAX_ROWS = 16
VECTOR = 8
"""Numbers of half precision that one instruction loads."""
_INNER_MULTIPLE = 16
_MOST_INNER = 512
"""A program has all of a head's."""
_HEAD_MULTIPLE = 16
"""A program has at most 8 pairs of outputs, all of one head."""


def takes(x: Tensor, weight: Tensor) -> bool:
    """Returns whether the kernel takes `x` [T, K] and `weight` [N, K]: half precision, few rows,
    and rows of both that begin where vectors may."""
    known = gemm_thresholds(x.device)
    most = known.rows_of_many if len(weight) > known.many_outputs else MAX_ROWS
    return bool(
        0 < len(x) <= most
        and weight.dtype in (torch.float16, torch.bfloat16)
        and x.dtype == weight.dtype
        and weight.shape[1] % _INNER_MULTIPLE == 0
        and x.stride(0) % VECTOR == 0
        and x.stride(1) == 1
        and weight.is_contiguous()
        and x.storage_offset() % VECTOR == weight.storage_offset() % VECTOR == 0
    )


def takes_heads(x: Tensor, weight: Tensor, kv_cache: Tensor) -> bool:
    """Returns whether `few_row_qkv` takes `x` [T, K] and `weight` [(Hq + 2 Hkv) D, K], whose keys
    and values go to `kv_cache` [N, 2, Hkv, B, D]."""
    return (
        ((takes_norm(x) and takes(x, weight)) or takes_warps(x, weight))
        and kv_cache.dtype == x.dtype
        and kv_cache.shape[-1] % _HEAD_MULTIPLE == 0
    )


def takes_norm(x: Tensor) -> bool:
    """Returns whether `few_row_qkv` normalises rows, too."""
    return len(x) <= gemm_thresholds(x.device).register_rows


def takes_by_head(x: Tensor, weight: Tensor) -> bool:
    """Returns whether `head_gemm` takes `x` [T, H, K] and `weight` [H, K, N]."""
    return (
        0 < len(x) <= gemm_thresholds(x.device).register_rows
        and weight.dtype in (torch.float16, torch.bfloat16)
        and x.dtype == weight.dtype
        and weight.shape[1] <= _MOST_INNER
        and x.stride(2) == 1
    )
