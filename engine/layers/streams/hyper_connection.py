"""Residual streams beside each other, and the weights by which layers read and write them.

    1. `HyperStream.begun`    all streams begin as the embedding
    2. `enter(connection)`    once a block: by which weights it reads, and its output is taken in
    3. `read`, `add`          by the block, as of a single stream
    4. `enter(head)`          behind the last layer; `normed` then gives the one row that is left

What a block adds waits until the next one reads, of four streams or few tokens: two launches do all
between them. By how much the streams take a block's output in is found beside the block in recorded
steps.

Source: Xie et al., Manifold-Constrained Hyper-Connections (arXiv 2512.24880).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.norm import RMSNorm
from engine.layers.residual import Addend, ResidualStream
from engine.layers.rows import PairOutputs, RowForm, Rows, UnnormedRows, UnscaledProduct
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.side_stream import NoSide, SideStream, fork, side_stream
from tandem_kernels import ops
from tandem_kernels.stream_forms import (
    FEW_ROWS,
    MANY_COUNT,
    GivenToStreams,
    StreamForm,
    StreamWeights,
)

_LANE = 1
"""Numbers the lane of the side: blocks launch theirs in another one, and do not wait for it."""


class HyperConnection(nn.Module):
    """Weights of one block, whole on every rank, in float32; see `reference.streams.read_streams`.

    Args:
        count: Streams, n.
    """

    def __init__(self, hidden_size: int, count: int, form: StreamForm, shard: Shard) -> None:
        super().__init__()
        self.form, self.beside_rows = form, shard.gemms.beside_rows
        if self.beside_rows > 0 and shard.device.type == "cuda":
            side_stream(shard.device, _LANE)
        width = (2 + count) * count
        self.fn = shard.parameter(width, count * hidden_size, dtype=torch.float32)
        self.base = shard.parameter(width, dtype=torch.float32)
        self.scale = shard.parameter(3, dtype=torch.float32)

    @property
    def weights(self) -> StreamWeights:
        """Returns them as operations are given them."""
        return StreamWeights(self.fn, self.base, self.scale)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns of `streams` [T, n, H] what the block reads, [T, H], and by how much each takes
        in what it adds, [T, n], and the others, [T, n, n]."""
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

    @property
    def weights(self) -> StreamWeights:
        """Returns them as operations are given them."""
        return StreamWeights(self.fn, self.base, self.scale)

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
        post, comb: See `reference.streams.read_streams`; of the last block that has read.
    """

    def __init__(self, streams: Tensor) -> None:
        super().__init__(streams[:, 0])
        self.streams = streams
        self.post = self.comb = streams
        self._block: HyperConnection | HyperHead | None = None
        self._given: GivenToStreams | None = None
        self._waits = False
        self._side: SideStream | NoSide = NoSide()
        self._kept: tuple[Tensor, ...] = ()

    @classmethod
    def begun(cls, x: Tensor, count: int) -> HyperStream:
        """Returns streams that all begin with `x` [T, H]."""
        return cls(torch.cat((x,) * count, dim=1).view(len(x), count, -1))

    def enter(self, block: HyperConnection | HyperHead) -> None:
        """Goes on with a block, which has not read yet."""
        self._block = block
        num_tokens, count, _ = self.streams.shape
        is_made = num_tokens <= FEW_ROWS or count == MANY_COUNT
        self._waits = is_made and not block.form.fixed_order

    def add(self, x: Addend) -> None:
        """Gives the streams what the block adds, [T, H]."""
        given, beside = x, None
        if isinstance(x, PairOutputs) and x.experts is None and x.gate is None:
            given, beside = x.parts, x.beside
        elif isinstance(x, UnscaledProduct):
            given = x.scaled()
        elif not isinstance(x, Tensor):
            given = x.summed()
        assert isinstance(given, Tensor)
        self._given = GivenToStreams(given, beside, self.post, self.comb)
        if not self._waits:
            self._take_in()

    def _take_in(self) -> None:
        """Gives the streams what waits."""
        given, self._given = self._given, None
        self._join()
        if given is not None:
            x = given.x if given.beside is None else ops.sum_pairs(given.x, None, given.beside)
            ops.write_streams(self.streams, x, given.post, given.comb)

    def settled(self) -> Tensor | None:
        """Returns None, not [T, H]: no kernel adds to the streams by itself."""
        return None

    def value(self) -> Tensor:
        """Returns a copy of all streams behind each other, [T, n H]."""
        self._take_in()
        return self.streams.flatten(1).clone()

    def read(self, norm: RMSNorm | None) -> Tensor:
        if norm is None or self._block is None or not self._waits:
            row = self._read()
            normed: Tensor = row if norm is None else norm(row)
            return normed
        block, given, self._block, self._given = self._block, self._given, None, None
        self._join()
        weights, form = block.weights, block.form
        self.streams, logits, squares = ops.mix_streams(self.streams, given, weights)
        if isinstance(block, HyperConnection):
            self._share(logits, squares, block)
        return ops.norm_streams(self.streams, logits, squares, weights, form, norm.form)

    def _share(self, logits: Tensor, squares: Tensor, block: HyperConnection) -> None:
        """Finds by how much the streams take in what `block` adds. What is read is kept until the
        side has joined: its memory is not the side's."""
        self._side, self._kept = fork(self.streams, block.beside_rows, _LANE), (logits, squares)
        of_block = block.weights, block.form, self.streams.shape[2]
        with self._side.beside():
            self.post, self.comb = ops.share_streams(logits, squares, *of_block)

    def _join(self) -> None:
        """Waits for what is computed beside a block."""
        self._side.join()
        self._side, self._kept = NoSide(), ()

    def _read(self) -> Tensor:
        """Returns what the block reads, [T, H]."""
        self._take_in()
        block, self._block = self._block, None
        if isinstance(block, HyperHead):
            self.sum = block(self.streams)
        elif block is not None:
            self.sum, self.post, self.comb = block(self.streams)
        return self.sum

    def read_rows(self, norm: RMSNorm | None, form: RowForm | None) -> Rows:
        if norm is None or form is None:
            return self.read(norm)
        return norm.add_quantised(None, self._read(), form)

    def read_unnormed(self, norm: RMSNorm | None, form: RowForm | None) -> Rows | UnnormedRows:
        return self.read_rows(norm, form)

    def normed(self, norm: RMSNorm) -> Tensor:
        return self.read(norm)
