"""Elementwise functions whose bits do not depend on where in a tensor a number stands.

torch's own compute the last few numbers of a tensor in another way on CPU, one by one, so that a
row's bits would depend on how many rows there are. `exp` and `log1p` have one way.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Computes 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """Computes x * sigmoid(x)."""
    return x / (1.0 + torch.exp(-x))


def gelu_tanh(x: Tensor) -> Tensor:
    """Computes GELU by its tanh formula, which is SiLU of another argument."""
    return x / (1.0 + torch.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


def softplus(x: Tensor) -> Tensor:
    """Computes log(1 + exp(x))."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))
