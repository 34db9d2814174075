"""GEMMs of deterministic mode: a row's bits do not depend on the batch."""

from __future__ import annotations

from torch import Tensor

from engine.layers.methods.base import LinearLayer, Unquantised
from tandem_kernels import ops


class Invariant(Unquantised):
    """Computes each row in one order. Groups of ranks are in fixed order in this mode."""

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        return ops.invariant_gemm(x, layer.weight, layer.bias)
