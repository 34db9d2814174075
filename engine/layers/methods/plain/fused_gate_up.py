"""Fused gate-up: the projection of many rows and its activation as one GEMM."""

from __future__ import annotations

from torch import Tensor

from engine.layers.methods.base import LinearLayer, Wrapped
from tandem_kernels import ops
from tandem_kernels.gemm import fused_gate_up_shapes


class FusedGateUp(Wrapped):
    """Computes gate·up of `rows` rows or more by a kernel of our own, activation included."""

    def gate_up(self, layer: LinearLayer, x: Tensor) -> Tensor:
        if len(x) >= self.rows and fused_gate_up_shapes.takes(x, layer.weight):
            return ops.fused_gate_up(x, layer.weight)
        return self.inner.gate_up(layer, x)
