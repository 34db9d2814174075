"""A residual stream whose layers are in blocks: what a layer reads is a mixture of what each block
has added, which a token chooses by itself.

    1. `BlockStream`     the embedding is the first block
    2. `enter(point)`    mixes complete blocks and the open one: for attention and for the
                         feed-forward block of each layer, and behind the last layer. Where a block
                         of layers begins, the open one is complete from then on
    3. `read`, `add`     as of a single stream; what is added goes to the open block

Source: Moonshot AI, Attention Residuals (arXiv 2603.15031).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.rows import RowForm, Rows, UnnormedRows
from engine.layers.shard import CheckpointWeight, Shard
from tandem_kernels import ops


class AttentionResidual(nn.Module):
    """Weights of one place that reads the stream, whole on every rank.

    Args:
        closes: A block is complete here.
    """

    def __init__(self, hidden_size: int, eps: float, shard: Shard, *, closes: bool = False) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden_size, eps, shard)
        self.query = shard.parameter(1, hidden_size)
        self.closes = closes

    def forward(self, blocks: Tensor, last: Tensor) -> Tensor:
        return ops.mix_blocks(blocks, last, self.query[0], self.norm.weight, self.norm.eps)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors, whose names begin with `prefix` and an underscore."""
        yield from self.norm.checkpoint_weights(f"{prefix}_norm")
        yield CheckpointWeight(f"{prefix}_proj.weight", self.query, tuple(self.query.shape))


class BlockStream(ResidualStream):
    """Holds what blocks of layers have added, each for itself.

    Args:
        x: [T, H]. Its memory becomes the stream's.
        most: Blocks that there may be.

    Attributes:
        sum: [T, H], of the open block.
    """

    def __init__(self, x: Tensor, most: int) -> None:
        super().__init__(x)
        self._bank = torch.empty((most, *x.shape), dtype=x.dtype, device=x.device)
        self._count = 0
        self._mixed = x

    @classmethod
    def resumed(cls, value: Tensor, size: int, most: int) -> BlockStream:
        """Returns the stream that goes on from its `value` [T, (n + 1) H], where H is `size`."""
        *blocks, last = value.view(len(value), -1, size).unbind(1)
        stream = cls(last.contiguous(), most)
        for block in blocks:
            stream._keep(block)
        return stream

    def value(self) -> Tensor:
        """Returns a copy of all blocks behind each other, the open one last: [T, (n + 1) H]."""
        return torch.cat((*self._bank[: self._count], super().value()), dim=1)

    def enter(self, point: AttentionResidual) -> None:
        """Computes what is read next."""
        total = super().read(None)
        self._mixed = total
        if self._count > 0:
            self._mixed = point(self._bank[: self._count], total)
        if point.closes:
            self._close(total)

    def _close(self, total: Tensor) -> None:
        block = self._keep(total)
        if self._count == 1:
            self._mixed = block
        self.sum = total.zero_()

    def _keep(self, block: Tensor) -> Tensor:
        self._count += 1
        return self._bank[self._count - 1].copy_(block)

    def settled(self) -> Tensor | None:
        """Returns None, not [T, H]: what is read is not what is added to."""
        return None

    def read(self, norm: RMSNorm | None) -> Tensor:
        if norm is None:
            return self._mixed
        normed: Tensor = norm(self._mixed)
        return normed

    def read_rows(self, norm: RMSNorm | None, form: RowForm | None) -> Rows:
        if norm is None or form is None:
            return self.read(norm)
        return norm.add_quantised(None, self._mixed, form)

    def read_unnormed(self, norm: RMSNorm | None, form: RowForm | None) -> Rows | UnnormedRows:
        return self.read_rows(norm, form)

    def normed(self, norm: RMSNorm) -> Tensor:
        return self.read(norm)
