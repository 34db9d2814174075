"""Products of few rows in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tandem_kernels.reference.elementwise import silu_and_mul


def narrow_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[T, K] x [N, K] -> [T, N], for few rows T."""
    return F.linear(x, weight, bias)


def partial_linear(x: Tensor, weight: Tensor) -> Tensor:
    """[T, K] x [N, K] -> float32 [S, T, N]: the sum over S is the product. The column decides S."""
    return F.linear(x.float(), weight.float())[None]


def gate_up_silu(x: Tensor, weight: Tensor) -> Tensor:
    """[T, K] x [2 I, K] -> [T, I]: `silu(gate) * up`, where gate are the first I outputs."""
    return silu_and_mul(F.linear(x, weight))
