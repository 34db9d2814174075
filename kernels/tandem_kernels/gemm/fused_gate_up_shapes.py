"""The shapes that the kernel of `fused_gate_up` can compute."""

from __future__ import annotations

import torch
from torch import Tensor

_INNER_MULTIPLE = 64
_LEAST_INNER = 256
_OUTPUTS_MULTIPLE = 256
_ALIGNED_BYTES = 16
"""The copy engine reads rows of x, which must begin so."""


def takes(x: Tensor, weight: Tensor) -> bool:
    """Returns whether the kernel takes `x` [T, K] and `weight` [2 I, K]: half precision, whole
    tiles of outputs and of K.
    """
    num_outputs, inner = weight.shape
    return (
        len(x) > 0
        and weight.dtype in (torch.float16, torch.bfloat16)
        and inner % _INNER_MULTIPLE == 0
        and inner >= _LEAST_INNER
        and num_outputs % _OUTPUTS_MULTIPLE == 0
        and x.stride(1) == 1
        and x.stride(0) * x.element_size() % _ALIGNED_BYTES == 0
        and x.data_ptr() % _ALIGNED_BYTES == 0
    )
