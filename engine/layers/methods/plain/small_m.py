"""Small-M GEMMs: few rows, where reading the weights is all that takes time."""

from __future__ import annotations

from torch import Tensor

from engine.layers.methods.base import LinearLayer, Wrapped
from tandem_kernels import ops
from tandem_kernels.gemm import small_m_shapes


class SmallM(Wrapped):
    """Computes at most `rows` rows by kernels of our own, gate·up with its activation."""

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        if len(x) <= self.rows and small_m_shapes.takes(x, layer.weight):
            return ops.small_m_gemm(x, layer.weight, layer.bias)
        return self.inner.apply(layer, x)

    def gate_up(self, layer: LinearLayer, x: Tensor) -> Tensor:
        if len(x) <= self.rows and small_m_shapes.takes(x, layer.weight):
            return ops.small_m_gate_up(x, layer.weight)
        return self.inner.gate_up(layer, x)
