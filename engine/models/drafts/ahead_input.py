"""A layer that predicts ahead reads of a token its embedding, and the feature of the token
before."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.linear import ReplicatedLinear
from engine.layers.norm import RMSNorm
from engine.layers.shard import CheckpointWeight, Shard
from engine.models.specs.ahead import AheadNames
from engine.models.specs.dense import DenseSpec


class AheadInput(nn.Module):
    """Norms of both, and their projections. A feature of several streams has one for all of them:

        one        eh_proj[norm of the embedding; norm of the feature]
        several    e_proj[norm of the embedding] + h_proj[norm of the stream], for each stream

    `number`: of the layer in the checkpoint's names.
    """

    def __init__(self, spec: DenseSpec, number: int, shard: Shard) -> None:
        super().__init__()
        self.names: AheadNames = spec.ahead
        self.number, self.size = number, spec.hidden_size
        self.enorm, self.hnorm = (
            RMSNorm(self.size, spec.rms_norm_eps, shard, offset=spec.norm_offset) for _ in range(2)
        )
        self.e_proj: ReplicatedLinear | None = None
        if name := self.names.embedding_projection:
            self.e_proj = ReplicatedLinear(self.size, self.size, shard.at(name.format(number)))
        at, parts = shard.at(self.names.projection.format(number)), 2 if self.e_proj is None else 1
        self.projection = ReplicatedLinear(parts * self.size, self.size, at)

    def forward(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Computes [T, H] and [T, n H] -> [T, n H]."""
        embedded = self.enorm(embedded)
        if self.e_proj is None:
            both = torch.cat([embedded, self.hnorm(features)], dim=-1)
            joined: Tensor = self.projection(both)
            return joined
        streams: Tensor = self.projection(self.hnorm(features.reshape(-1, self.size)))
        streams = streams.view(len(features), -1, self.size) + self.e_proj(embedded).unsqueeze(1)
        return streams.flatten(1)

    def checkpoint_weights(self) -> Iterator[CheckpointWeight]:
        names, number = self.names, self.number
        yield from self.enorm.checkpoint_weights(names.embedding_norm.format(number))
        yield from self.hnorm.checkpoint_weights(names.feature_norm.format(number))
        yield from self.projection.checkpoint_weights(names.projection.format(number))
        if self.e_proj is not None:
            yield from self.e_proj.checkpoint_weights(names.embedding_projection.format(number))
