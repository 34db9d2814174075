"""Streams of which a layer computes one, and predicts and corrects the others (AltUp), and the
low-rank way around its attention (LAuReL).

    1. `AltStream`       n streams, of which the first is what layers read and write
    2. `Prediction`      all of them, from what they were; attention reads the first
    3. `LowRankWay`      what attention adds, and a low-rank product of what it read
    4. `Correction`      all of them, by how far the layer's result is from its prediction

Sources: Baykal et al., Alternating Updates (arXiv 2301.13310); Menghani et al., LAuReL (arXiv
2411.07501); Gemma 3n (Google, 2025).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.linear import ReplicatedLinear
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.shard import CheckpointWeight, Shard

_LEAST_SQUARE = 1e-5
_ROUTER, _ROUTER_NORM = "altup.modality_router", "altup.router_norm"
_LEFT, _RIGHT, _LOW_RANK_NORM = (
    "laurel.linear_left", "laurel.linear_right", "laurel.post_laurel_norm",
)  # fmt: skip
_INTO, _BACK = "altup_projections", "altup_unembed_projections"


class AltStream(ResidualStream):
    """Holds n streams, [T, n, H]. What blocks read and add to is the first, in memory of its own.

    Args:
        streams: [T, n, H].
    """

    def __init__(self, streams: Tensor) -> None:
        super().__init__(streams[:, 0].clone())
        self.streams = streams

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self.streams = self.streams.index_select(0, rows)

    def end_layer(self) -> None:
        """Adds what waits, the layer's own input, to all streams but the first."""
        first = self.streams[:, 0].clone()
        self.sum = torch.zeros_like(first)
        self.streams[:, 1:] += self.read(None)[:, None]
        self.sum = first


class _Router(nn.Module):
    """[T, H] -> [T, n] in float32: how much of a token belongs to each stream."""

    def __init__(self, hidden_size: int, count: int, eps: float, shard: Shard) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden_size, eps, shard, factor=1 / hidden_size)
        self.linear = ReplicatedLinear(hidden_size, count, shard.at(_ROUTER))

    def forward(self, rows: Tensor) -> Tensor:
        routed: Tensor = self.linear(self.norm(rows))
        return torch.tanh(routed.float())


class Prediction(nn.Module):
    """Tells all streams in front of a layer from those behind the one before."""

    def __init__(self, router: _Router, count: int, shard: Shard) -> None:
        super().__init__()
        self.router, self.count = router, count
        self.weight = shard.parameter(count * count, count)

    def enter(self, stream: AltStream) -> None:
        """Replaces the streams by what is predicted of them."""
        before = stream.streams.float()
        shares = _products(self.router(stream.streams[:, 0].contiguous()), self.weight)
        shares = shares.view(-1, self.count, self.count, 1)
        found = before.clone()
        for index in range(self.count):
            found.addcmul_(shares[:, :, index], before[:, index : index + 1])
        stream.streams = found.to(stream.sum.dtype)
        stream.sum = stream.streams[:, 0].clone()


class LowRankWay(nn.Module):
    """Adds to attention's result a low-rank product of what it read, and its input once more."""

    def __init__(
        self, hidden_size: int, rank: int, eps: float, input_norm: RMSNorm, shard: Shard
    ) -> None:
        super().__init__()
        self.input_norm = input_norm
        self.left = ReplicatedLinear(hidden_size, rank, shard.at(_LEFT))
        self.right = ReplicatedLinear(rank, hidden_size, shard.at(_RIGHT))
        self.norm = RMSNorm(hidden_size, eps, shard)

    def enter(self, stream: AltStream) -> None:
        """Changes the first stream, to which attention has been added."""
        normed = self.input_norm(stream.streams[:, 0].contiguous())
        around = normed + self.norm(self.right(self.left(normed)))
        stream.sum = (stream.read(None) + around).mul_(2**-0.5)


class Correction(nn.Module):
    """Corrects all streams behind a layer, whose own input then reads the scaled first one."""

    def __init__(self, router: _Router, hidden_size: int, count: int, shard: Shard) -> None:
        super().__init__()
        self.router = router
        self.weight = shard.parameter(count, count)
        self.scale = shard.parameter(hidden_size)

    def enter(self, stream: AltStream) -> None:
        """Replaces the streams by the corrected ones."""
        computed, before = stream.read(None), stream.streams.float()
        shares = 1.0 + _products(self.router(computed), self.weight)
        missed = computed.float() - before[:, 0]
        corrected = torch.addcmul(before, shares[:, :, None], missed[:, None])
        stream.streams = corrected.to(computed.dtype)
        stream.sum = stream.streams[:, 0] * self.scale


class AltUp(nn.Module):
    """The weights of one layer, whole on every rank."""

    def __init__(
        self, hidden_size: int, count: int, rank: int, eps: float, norm: RMSNorm, shard: Shard
    ) -> None:
        super().__init__()
        self.router = _Router(hidden_size, count, eps, shard)
        self.prediction = Prediction(self.router, count, shard)
        self.low_rank = LowRankWay(hidden_size, rank, eps, norm, shard)
        self.correction = Correction(self.router, hidden_size, count, shard)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors of a layer called `prefix`."""
        router, way, correction = self.router, self.low_rank, self.correction
        for name, norm in ((_ROUTER_NORM, router.norm), (_LOW_RANK_NORM, way.norm)):
            own = f"{prefix}.{name}"
            if norm.factor != 1.0:
                yield norm.scaled_weight(f"{own}.weight")
            else:
                yield from norm.checkpoint_weights(own)
        for name, linear in ((_ROUTER, router.linear), (_LEFT, way.left), (_RIGHT, way.right)):
            yield from linear.checkpoint_weights(f"{prefix}.{name}")
        for name, weight in (
            ("prediction_coefs.weight", self.prediction.weight),
            ("correction_coefs.weight", correction.weight),
            ("correct_output_scale", correction.scale),
        ):
            yield CheckpointWeight(f"{prefix}.altup.{name}", weight, tuple(weight.shape))


class AltEnds(nn.Module):
    """Makes the streams of embeddings, and of all streams the row that is left."""

    into: nn.ModuleList
    back: nn.ModuleList

    def __init__(self, hidden_size: int, count: int, shard: Shard) -> None:
        super().__init__()
        self.into, self.back = (
            nn.ModuleList(
                ReplicatedLinear(hidden_size, hidden_size, shard.at(f"{name}.{index}"))
                for index in range(count - 1)
            )
            for name in (_INTO, _BACK)
        )

    def begin(self, rows: Tensor) -> AltStream:
        """Returns the streams of embeddings [T, H]: the others are as large as these."""
        size = _size(rows)
        others = [_sized(linear(rows), size) for linear in self.into]
        return AltStream(torch.stack((rows, *others), dim=1))

    def enter(self, stream: AltStream) -> None:
        """Leaves the mean of all streams, each as large as the first."""
        first = stream.streams[:, 0]
        total, size = first.float(), _size(first)
        for index, linear in enumerate(self.back):
            other = linear(stream.streams[:, index + 1].contiguous())
            total = total + _sized(other, size).float()
        stream.sum = (total / stream.streams.shape[1]).to(first.dtype)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        for name, linears in ((_INTO, self.into), (_BACK, self.back)):
            for index, linear in enumerate(linears):
                assert isinstance(linear, ReplicatedLinear)
                yield from linear.checkpoint_weights(f"{prefix}.{name}.{index}")


def _products(rows: Tensor, weight: Tensor) -> Tensor:
    """Returns [T, out] of rows [T, n] and a small weight [out, n], in the same order for any T."""
    return (rows[:, None] * weight.float()).sum(-1)


def _size(rows: Tensor) -> Tensor:
    return rows.float().square().mean(-1, keepdim=True).sqrt()


def _sized(rows: Tensor, size: Tensor) -> Tensor:
    """Returns rows [T, H] whose root mean squares are `size` [T, 1]."""
    squares = rows.float().square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE)
    return (rows * (size / squares.sqrt())).to(rows.dtype)
