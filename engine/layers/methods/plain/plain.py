"""GEMMs by the library."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.layers.methods.base import LinearLayer, Unquantised
from engine.layers.rows import Rows


class Plain(Unquantised):
    """Leaves every GEMM to torch."""

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight, layer.bias)

    def accumulate(self, layer: LinearLayer, x: Rows, out: Tensor) -> None:
        assert isinstance(x, Tensor)
        out.addmm_(x, layer.weight.t())
