"""Small-M GEMMs: few rows, where reading the weights is all that takes time."""

from __future__ import annotations

from torch import Tensor

from engine.layers.methods.base import LinearLayer, LinearMethod, Wrapped
from tandem_kernels import ops
from tandem_kernels.device import num_programs
from tandem_kernels.gemm import small_m_shapes

_TILE = 64
"""Outputs of a program where these are many."""


class SmallM(Wrapped):
    """Computes at most `rows` rows by kernels of our own, gate·up with its activation.

    Args:
        rows: 0: only those of layers whose tiles fill the SMs once.
        wide_rows: Of these.
    """

    def __init__(self, inner: LinearMethod, rows: int, wide_rows: int) -> None:
        super().__init__(inner, rows)
        self.wide_rows = wide_rows

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        if self._takes(layer, x, gated=False):
            return ops.small_m_gemm(x, layer.weight, layer.bias)
        return self.inner.apply(layer, x)

    def gate_up(self, layer: LinearLayer, x: Tensor) -> Tensor:
        if self._takes(layer, x, gated=True):
            return ops.small_m_gate_up(x, layer.weight)
        return self.inner.gate_up(layer, x)

    def _takes(self, layer: LinearLayer, x: Tensor, *, gated: bool) -> bool:
        most = self.wide_rows if fills_once(layer.weight, gated=gated) else self.rows
        return len(x) <= most and small_m_shapes.takes(x, layer.weight)


def outputs_of(weight: Tensor, *, gated: bool) -> int:
    """Returns the outputs of a product with `weight` [N, K]: gate·up has two rows for each."""
    return len(weight) // (1 + gated)


def fills_once(weight: Tensor, *, gated: bool) -> bool:
    """Returns whether tiles of `weight` [N, K] are four fifths of the SMs or more, and no more than
    these: then each SM reads one tile, and hardly any reads none."""
    tiles, sms = outputs_of(weight, gated=gated) / _TILE, num_programs(weight.device, 1)
    return 4 * sms <= 5 * tiles <= 5 * sms
