"""Root-mean-square normalisation."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from engine.layers.shard import CheckpointWeight, Shard
from tandem_kernels import ops


class RMSNorm(nn.Module):
    """[T, size] -> [T, size]. Whole on every rank."""

    def __init__(self, size: int, eps: float, shard: Shard) -> None:
        super().__init__()
        self.eps = eps
        self.weight = shard.parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (norm of the sum, the sum). The inputs' memory may be reused."""
        return ops.fused_add_rms_norm(x, residual, self.weight, self.eps)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield CheckpointWeight(prefix + ".weight", self.weight, tuple(self.weight.shape))
