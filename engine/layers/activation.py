"""Gated activation of the feed-forward network."""

from __future__ import annotations

from torch import Tensor, nn

from tandem_kernels import ops


class SiluAndMul(nn.Module):
    """[T, 2 I] -> [T, I]: silu(gate) * up, gate first."""

    def forward(self, gate_up: Tensor) -> Tensor:
        return ops.silu_and_mul(gate_up)
