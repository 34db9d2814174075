"""Elementwise functions whose bits do not depend on where in a tensor a number stands.

torch's own compute the last few numbers of a tensor in another way on CPU, one by one, so that a
row's bits would depend on how many rows there are. `exp` and `log1p` have one way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.elementwise.gate_form import GateForm


def sigmoid(x: Tensor) -> Tensor:
    """Computes 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """Computes x * sigmoid(x)."""
    return x / (1.0 + torch.exp(-x))


def gelu_tanh(x: Tensor) -> Tensor:
    """Computes GELU by its tanh formula, which is SiLU of another argument."""
    return x / (1.0 + torch.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


def situ(gate: Tensor, up: Tensor, form: GateForm) -> Tensor:
    """Computes what `GateForm` says of `situ`, in float32."""
    gate = _soft(gate, form.alpha) * sigmoid(gate)
    return gate * _soft(up, form.limit)


def _soft(x: Tensor, most: float) -> Tensor:
    """Computes most * tanh(x / most)."""
    return most * (2.0 / (1.0 + torch.exp(-2.0 * x / most)) - 1.0)


def softplus(x: Tensor) -> Tensor:
    """Computes log(1 + exp(x))."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))
