"""Small-M GEMMs: few rows, where reading the weights is all that takes time."""

from __future__ import annotations

import torch
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
        if self._takes(layer, x, len(layer.weight)):
            return ops.small_m_gemm(x, layer.weight, layer.bias)
        return self.inner.apply(layer, x)

    def gate_up(self, layer: LinearLayer, x: Tensor) -> Tensor:
        if self._takes(layer, x, len(layer.weight) // 2):
            return ops.small_m_gate_up(x, layer.weight)
        return self.inner.gate_up(layer, x)

    def _takes(self, layer: LinearLayer, x: Tensor, num_outputs: int) -> bool:
        most = self.wide_rows if fills_once(x.device, num_outputs) else self.rows
        return len(x) <= most and small_m_shapes.takes(x, layer.weight)


def fills_once(device: torch.device, num_outputs: int) -> bool:
    """Returns whether tiles are four fifths of the SMs or more, and no more than these: then each
    SM reads one tile, and hardly any reads none."""
    tiles, sms = num_outputs / _TILE, num_programs(device, 1)
    return 4 * sms <= 5 * tiles <= 5 * sms
