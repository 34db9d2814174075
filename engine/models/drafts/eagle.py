"""EAGLE's first form: one layer that reads an embedding and what the model's last norm gave.

Source: Li et al., EAGLE (arXiv 2401.15077).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.config import DraftModel, EngineConfig
from engine.layers.linear import ReplicatedLinear
from engine.layers.residual import ResidualStream
from engine.layers.shard import CheckpointWeight, Shard
from engine.models.base import CausalLM, ForwardInputs
from engine.models.decoder.decoder_layer import DecoderLayer
from engine.models.decoder.layer_kinds import LayerKinds
from engine.models.draft_checkpoint import EagleSpec
from engine.models.drafts.base import DraftNetwork, behind_first


class EagleHead(DraftNetwork):
    """layer(fc[embedding; feature]), then the other model's head, without a norm."""

    def __init__(
        self,
        config: EngineConfig,
        draft: DraftModel,
        spec: EagleSpec,
        shard: Shard,
        target: CausalLM,
    ) -> None:
        super().__init__(target)
        size = spec.hidden_size
        self.fc = ReplicatedLinear(2 * size, size, shard.at("fc"), bias=draft.options["bias"])
        self.layer = DecoderLayer(config, spec, shard.at("layers.0"), 0)
        self.kinds = LayerKinds(config, spec, [0], shard.device)

    def forward(self, step: ForwardInputs, features: Tensor) -> Tensor:
        x = self.fc(torch.cat([self.target.embedded(step.input_ids), features], dim=-1))
        stream = ResidualStream(behind_first(x, step.positions))
        self.layer(stream, step.kv_caches[0], self.kinds.inputs(step)[0])
        step.on_layer(0)
        return stream.read(None)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.target.compute_logits(hidden)

    def checkpoint_weights(self) -> Iterator[CheckpointWeight]:
        yield from self.fc.checkpoint_weights("fc")
        yield from self.layer.checkpoint_weights("layers.0")

    @property
    def unused_weights(self) -> frozenset[str]:
        return frozenset({"embed_tokens.", "lm_head."})
