"""The shapes that the kernels of `small_m_gemm` can compute."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_ROWS = 64
_INNER_MULTIPLE = 256
OUTPUTS_MULTIPLE = 128


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
