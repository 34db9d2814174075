"""The numbers of an FP8 cache in plain torch. Their scales are given, not found."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.attention.kv_scales import E4M3
from tandem_kernels.reference.fp8 import E4M3_MAX


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    """Rounds `x / scale` to the nearest e4m3 number, ties to even. What is too large becomes the
    largest there is: releases of torch differ in what their own conversion makes of it."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def dequantise(x: Tensor, scale: Tensor) -> Tensor:
    """Returns float32."""
    return x.view(E4M3).to(torch.float32) * scale
