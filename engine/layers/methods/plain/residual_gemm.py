"""Residual GEMMs: row layers that add to the residual stream themselves."""

from __future__ import annotations

from torch import Tensor

from engine.layers.methods.base import LinearLayer, Wrapped


class ResidualGemm(Wrapped):
    """Adds `rows` rows or more in the GEMM, so that the norm that follows reads and writes half as
    much. For one rank only: others' parts of the sum would be missing."""

    def add_to(self, layer: LinearLayer, x: Tensor, residual: Tensor) -> bool:
        if len(residual) < self.rows or layer.bias is not None:
            return self.inner.add_to(layer, x, residual)
        residual.addmm_(x, layer.weight.t())
        return True
