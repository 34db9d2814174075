"""Makes the residual stream that a model's layers share: one, or several that are mixed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.norm import RMSNorm
from engine.layers.residual import NormedStream, ResidualStream
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.streams.alternating import (
    AltEnds,
    AltStream,
    AltUp,
    Correction,
    LowRankWay,
    Prediction,
)
from engine.layers.streams.attention_residual import AttentionResidual, BlockStream
from engine.layers.streams.hyper_connection import HyperConnection, HyperHead, HyperStream
from engine.models.specs.dense import DenseSpec
from tandem_kernels.stream_forms import StreamForm

_HEAD, _RESIDUAL = "hc_head", "output_attn_res"


class Streams(nn.Module):
    """Begins the stream of a pass and ends it; `spec` says how many there are.

    Attributes:
        like: [0, n H], what stages of a pipeline give each other.
    """

    head: HyperHead | None
    ends: AltEnds | None
    mixture: AttentionResidual | None

    def __init__(self, spec: DenseSpec, shard: Shard, num_layers: int) -> None:
        super().__init__()
        self.streams, self.norm_factor = spec.residual_streams, spec.norm_factor
        self.head = self.ends = self.mixture = None
        self.size, width = spec.hidden_size, 1 if self.streams is None else self.streams.count
        self.num_blocks = 0
        if size := spec.block_layers:
            self.mixture = AttentionResidual(spec.hidden_size, spec.rms_norm_eps, shard)
            self.num_blocks = -(-num_layers // size)
            width += -(-shard.place.layers.start // size)
        self.like = torch.empty(0, width * self.size, dtype=shard.dtype, device=shard.device)
        if (alternating := spec.alternating_streams) is not None:
            self.ends = AltEnds(spec.hidden_size, alternating.count, shard.at("model"))
        if self.streams is not None:
            count = self.streams.count
            self.head = HyperHead(spec.hidden_size, count, _form(spec, shard), shard)

    def begin(self, rows: Tensor) -> ResidualStream:
        """Returns the stream that begins with `rows` [T, H], whose memory becomes the stream's."""
        if self.ends is not None:
            return self.ends.begin(rows)
        if self.mixture is not None:
            return BlockStream(rows, self.num_blocks)
        if self.norm_factor:
            return NormedStream(rows, self.norm_factor)
        streams = self.streams
        return ResidualStream(rows) if streams is None else HyperStream.begun(rows, streams.count)

    def resumed(self, value: Tensor) -> ResidualStream:
        """Returns the stream that goes on from its `value` [T, n H], whose memory becomes the
        stream's."""
        if self.mixture is not None:
            return BlockStream.resumed(value, self.size, self.num_blocks)
        if self.streams is None:
            return self.begin(value)
        return HyperStream(value.view(len(value), self.streams.count, -1))

    def normed(self, stream: ResidualStream, norm: RMSNorm) -> Tensor:
        """Returns the norm behind all layers, [T, H]."""
        if isinstance(stream, HyperStream):
            assert self.head is not None
            stream.enter(self.head)
        enter(stream, self.ends or self.mixture)
        return stream.normed(norm)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        if self.ends is not None:
            yield from self.ends.checkpoint_weights(prefix)
        if self.head is not None:
            yield from self.head.checkpoint_weights(f"{prefix}.{_HEAD}")
        if self.mixture is not None:
            yield from self.mixture.checkpoint_weights(f"{prefix}.{_RESIDUAL}")


class LayerStreams(nn.Module):
    """Says what the blocks of layer `index` read of several streams; of one, they read all. `norm`:
    of what attention reads."""

    attention: HyperConnection | Prediction | AttentionResidual | None
    mlp: HyperConnection | LowRankWay | AttentionResidual | None
    input: Correction | None
    altup: AltUp | None

    def __init__(self, spec: DenseSpec, shard: Shard, norm: RMSNorm | None, index: int) -> None:
        super().__init__()
        self.attention = self.mlp = self.input = self.altup = None
        if (alternating := spec.alternating_streams) is not None:
            assert norm is not None
            sizes_of = spec.hidden_size, alternating.count, alternating.rank, spec.rms_norm_eps
            self.altup = altup = AltUp(*sizes_of, norm, shard)
            self.attention, self.mlp = altup.prediction, altup.low_rank
            self.input = altup.correction
        if (streams := spec.residual_streams) is not None:
            sizes = spec.hidden_size, streams.count, _form(spec, shard), shard
            self.attention, self.mlp = HyperConnection(*sizes), HyperConnection(*sizes)
        if size := spec.block_layers:
            of = spec.hidden_size, spec.rms_norm_eps, shard
            self.attention = AttentionResidual(*of, closes=index % size == 0)
            self.mlp = AttentionResidual(*of)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        if self.altup is not None:
            yield from self.altup.checkpoint_weights(prefix)
        for connection, name in ((self.attention, "hc_attn"), (self.mlp, "hc_ffn")):
            if isinstance(connection, HyperConnection):
                yield from connection.checkpoint_weights(f"{prefix}.{name}")
        for point, name in ((self.attention, "self_attention_res"), (self.mlp, "mlp_res")):
            if isinstance(point, AttentionResidual):
                yield from point.checkpoint_weights(f"{prefix}.{name}")


def enter(
    stream: ResidualStream,
    block: (
        HyperConnection | AttentionResidual | Prediction | LowRankWay | Correction | AltEnds | None
    ),
) -> None:
    """Makes the stream ready for a block."""
    if isinstance(block, HyperConnection):
        assert isinstance(stream, HyperStream)
        stream.enter(block)
    elif isinstance(block, AttentionResidual):
        assert isinstance(stream, BlockStream)
        stream.enter(block)
    elif block is not None:
        assert isinstance(stream, AltStream)
        block.enter(stream)


def end_layer(stream: ResidualStream) -> None:
    """Gives several streams what a layer's own input adds to them."""
    if isinstance(stream, AltStream):
        stream.end_layer()


def _form(spec: DenseSpec, shard: Shard) -> StreamForm:
    streams = spec.residual_streams
    assert streams is not None
    fixed = shard.gemms.deterministic
    return StreamForm(streams.iterations, streams.eps, spec.rms_norm_eps, fixed_order=fixed)
