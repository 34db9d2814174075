"""Root-mean-square normalisation of a row whose parts lie on different ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.shard import CheckpointWeight, Shard
from tandem_kernels import ops


class SplitRMSNorm(nn.Module):
    """[T, count] -> [T, count] in the dtype of the input: this rank's part of rows of `total`,
    normalised by the mean square of whole rows, in float32.

    Args:
        start, count: This rank's part. Several ranks may have the same one.
        order: [count] int64 or None: element i of ours is element `order[i]` of the checkpoint's
            part.
    """

    def __init__(
        self,
        start: int,
        count: int,
        total: int,
        eps: float,
        shard: Shard,
        *,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.start, self.total = start, total
        self.eps = eps
        self.order = order
        self.group = shard.tp
        self.times_counted = shard.tp.size * count // total
        self.ones: Tensor | None = None
        if shard.gemms.deterministic and shard.tp.size > 1:
            self.ones = torch.ones(1, count, device=shard.device)
        self.weight = shard.parameter(count)

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return ops.rms_norm(x, self.weight, self.eps)
        wide = x.float()
        squares = self.group.all_reduce(self._sum(wide.square()))
        mean = squares / (self.times_counted * self.total)
        return (wide * torch.rsqrt(mean + self.eps) * self.weight.float()).to(x.dtype)

    def _sum(self, squares: Tensor) -> Tensor:
        """Sums each row. torch chooses the order on a GPU by how many rows there are."""
        if self.ones is not None:
            return ops.invariant_gemm(squares, self.ones)
        return squares.sum(dim=-1, keepdim=True)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield CheckpointWeight(
            prefix + ".weight", self.weight, (self.total,), 0, self.start, self.order
        )
