"""Says how kernels multiply numbers of a type."""

from __future__ import annotations

import torch
from torch import Tensor


def precision_of(x: Tensor) -> str:
    """Returns the precision of products of `x`, which matters for those of float32 alone."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
