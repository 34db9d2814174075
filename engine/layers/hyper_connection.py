"""Residual streams beside each other, and the weights by which layers read and write them.

    1. `HyperStream.begun`    all streams begin as the embedding
    2. `enter(connection)`    once a block: what it will read, and how streams take in what it adds
    3. `read`, `add`          by the block, as of a single stream
    4. `enter(head)`          behind the last layer; `normed` then gives the one row that is left

Source: Xie et al., Manifold-Constrained Hyper-Connections (arXiv 2512.24880).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.norm import RMSNorm
from engine.layers.residual import Addend, ResidualStream
from engine.layers.rows import RowForm, Rows, UnnormedRows, UnscaledProduct
from engine.layers.shard import CheckpointWeight, Shard
from tandem_kernels import ops
from tandem_kernels.stream_forms import StreamForm


class HyperConnection(nn.Module):
    """Weights of one block, whole on every rank, in float32; see `reference.streams.read_streams`.

    Args:
        count: Streams, n.
    """

    def __init__(self, hidden_size: int, count: int, form: StreamForm, shard: Shard) -> None:
        super().__init__()
        self.form = form
        width = (2 + count) * count
        self.fn = shard.parameter(width, count * hidden_size, dtype=torch.float32)
        self.base = shard.parameter(width, dtype=torch.float32)
        self.scale = shard.parameter(3, dtype=torch.float32)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return ops.read_streams(streams, self.fn, self.base, self.scale, self.form)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors, whose names begin with `prefix` and an underscore."""
        for name, parameter in self.named_parameters():
            yield CheckpointWeight(f"{prefix}_{name}", parameter, tuple(parameter.shape))


class HyperHead(nn.Module):
    """Makes one row of the streams behind all layers: [T, n, H] -> [T, H]."""

    def __init__(self, hidden_size: int, count: int, form: StreamForm, shard: Shard) -> None:
        super().__init__()
        self.form = form
        self.fn = shard.parameter(count, count * hidden_size, dtype=torch.float32)
        self.base = shard.parameter(count, dtype=torch.float32)
        self.scale = shard.parameter(1, dtype=torch.float32)

    def forward(self, streams: Tensor) -> Tensor:
        return ops.join_streams(streams, self.fn, self.base, self.scale, self.form)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        for name, parameter in self.named_parameters():
            yield CheckpointWeight(f"{prefix}_{name}", parameter, tuple(parameter.shape))


class HyperStream(ResidualStream):
    """Holds n streams, [T, n, H], which blocks read and write as if they were one.

    Args:
        streams: [T, n, H]. Their memory becomes the stream's.

    Attributes:
        post, comb: See `reference.streams.read_streams`; of the last block that was entered.
    """

    def __init__(self, streams: Tensor) -> None:
        super().__init__(streams[:, 0])
        self.streams = streams
        self.post = self.comb = streams

    @classmethod
    def begun(cls, x: Tensor, count: int) -> HyperStream:
        """Returns streams that all begin with `x` [T, H]."""
        return cls(x[:, None].repeat(1, count, 1))

    def enter(self, block: HyperConnection | HyperHead) -> None:
        """Computes what the block reads."""
        if isinstance(block, HyperHead):
            self.sum = block(self.streams)
        else:
            self.sum, self.post, self.comb = block(self.streams)

    def add(self, x: Addend) -> None:
        """Gives the streams what the block adds, [T, H]."""
        if isinstance(x, UnscaledProduct):
            x = x.scaled()
        elif not isinstance(x, Tensor):
            x = x.summed()
        ops.write_streams(self.streams, x, self.post, self.comb)

    def settled(self) -> Tensor | None:
        """Returns None, not [T, H]: no kernel adds to the streams by itself."""
        return None

    def value(self) -> Tensor:
        """Returns a copy of all streams behind each other, [T, n H]."""
        return self.streams.flatten(1).clone()

    def read(self, norm: RMSNorm | None) -> Tensor:
        if norm is None:
            return self.sum
        normed: Tensor = norm(self.sum)
        return normed

    def read_rows(self, norm: RMSNorm | None, form: RowForm | None) -> Rows:
        if norm is None or form is None:
            return self.read(norm)
        return norm.add_quantised(None, self.sum, form)

    def read_unnormed(self, norm: RMSNorm | None, form: RowForm | None) -> Rows | UnnormedRows:
        return self.read_rows(norm, form)

    def normed(self, norm: RMSNorm) -> Tensor:
        return self.read(norm)
