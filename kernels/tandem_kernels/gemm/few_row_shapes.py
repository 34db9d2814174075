"""The shapes that `few_row_gemm` can compute."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_ROWS = 16
VECTOR = 8
"""Numbers of half precision that one instruction loads."""
_INNER_MULTIPLE = 16


def takes(x: Tensor, weight: Tensor) -> bool:
    """Returns whether the kernel takes `x` [T, K] and `weight` [N, K]: half precision, few rows,
    and rows of both that begin where vectors may."""
    return (
        0 < len(x) <= MAX_ROWS
        and weight.dtype in (torch.float16, torch.bfloat16)
        and x.dtype == weight.dtype
        and weight.shape[1] % _INNER_MULTIPLE == 0
        and x.stride(0) % VECTOR == 0
        and x.stride(1) == 1
        and weight.is_contiguous()
    )
