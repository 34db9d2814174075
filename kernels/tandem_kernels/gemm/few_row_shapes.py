"""The shapes that `few_row_gemm` can compute."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_ROWS = 16
_MANY_OUTPUTS, _MAX_ROWS_OF_MANY = 4096, 2
"""Layers with more outputs keep the library busy from fewer rows on."""
VECTOR = 8
"""Numbers of half precision that one instruction loads."""
_INNER_MULTIPLE = 16


def takes(x: Tensor, weight: Tensor) -> bool:
    """Returns whether the kernel takes `x` [T, K] and `weight` [N, K]: half precision, few rows,
    and rows of both that begin where vectors may."""
    most = _MAX_ROWS_OF_MANY if len(weight) > _MANY_OUTPUTS else MAX_ROWS
    return (
        0 < len(x) <= most
        and weight.dtype in (torch.float16, torch.bfloat16)
        and x.dtype == weight.dtype
        and weight.shape[1] % _INNER_MULTIPLE == 0
        and x.stride(0) % VECTOR == 0
        and x.stride(1) == 1
        and weight.is_contiguous()
    )
