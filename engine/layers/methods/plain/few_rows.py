"""GEMMs of few rows whose sizes `small_m` does not take, or that have few outputs, with their bias.

Of sizes that it takes, row layers are the library's, but where `SmallM` has them: at one row of
Llama-3.1-8B a step is 4.42 ms with these, and 4.64 with this kernel, which adds them to the
residual stream (one H200). Fewer outputs than there the library computes in parts, and adds these
up in a launch of their own: 2048 of 4096 inputs take 9.6 us, and 5.9 by this kernel.
"""

from __future__ import annotations

from torch import Tensor

from engine.layers.methods.base import LinearLayer, LinearMethod, Wrapped
from tandem_kernels import ops
from tandem_kernels.gemm import few_row_shapes, small_m_shapes
from tandem_kernels.gemm.gemm_thresholds import gemm_thresholds


class FewRows(Wrapped):
    """Computes at most `rows` rows by a kernel of our own.

    Args:
        adds: To the residual stream, too. For one rank only: others' parts of the sum would be
            missing.
    """

    def __init__(self, inner: LinearMethod, rows: int, *, adds: bool) -> None:
        super().__init__(inner, rows)
        self.adds = adds

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        if self._takes(layer, x):
            return ops.few_row_gemm(x, layer.weight, layer.bias)
        return self.inner.apply(layer, x)

    def add_to(self, layer: LinearLayer, x: Tensor, residual: Tensor) -> bool:
        if not self.adds or not self._takes(layer, x):
            return self.inner.add_to(layer, x, residual)
        ops.few_row_gemm(x, layer.weight, layer.bias, residual)
        return True

    def _takes(self, layer: LinearLayer, x: Tensor) -> bool:
        if len(x) > self.rows or not few_row_shapes.takes(x, layer.weight):
            return False
        known = gemm_thresholds(x.device)
        in_parts = len(layer.weight) < known.many_outputs and len(x) <= known.register_rows
        return in_parts or not small_m_shapes.takes(x, layer.weight)
