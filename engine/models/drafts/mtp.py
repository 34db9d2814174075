"""A layer for multi-token prediction, as checkpoints have it behind their last one.

DeepSeek V3 and GLM 4.5 store `enorm`, `hnorm`, `eh_proj` and `shared_head.norm` with it, and
copies of the model's embedding and head. Of several such layers the first drafts all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.config import DraftModel, EngineConfig
from engine.layers.linear import ReplicatedLinear
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.shard import CheckpointWeight, Shard
from engine.models.base import CausalLM, ForwardInputs
from engine.models.drafts.base import DraftNetwork, behind_first
from engine.models.layer_kinds import LayerKinds
from engine.models.llama_layer import LlamaDecoderLayer
from engine.models.specs.dense import DenseSpec


class MtpLayer(DraftNetwork):
    """layer(eh_proj[norm of the embedding; norm of the feature]), a norm, the model's head."""

    def __init__(
        self,
        config: EngineConfig,
        draft: DraftModel,
        spec: DenseSpec,
        shard: Shard,
        target: CausalLM,
    ) -> None:
        super().__init__(target)
        self.index: int = draft.options["index"]
        self.num_extra_layers = spec.num_extra_layers
        self.spec = spec
        self.name = f"model.layers.{self.index}"
        at = shard.at(self.name)
        size, eps = spec.hidden_size, spec.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (
            RMSNorm(size, eps, shard, offset=spec.norm_offset) for _ in range(3)
        )
        self.eh_proj = ReplicatedLinear(2 * size, size, at.at("eh_proj"))
        self.layer = LlamaDecoderLayer(config, spec, at, self.index)
        self.kinds = LayerKinds(config, spec, [0], shard.device)

    def forward(self, step: ForwardInputs, features: Tensor) -> Tensor:
        embedded = self.enorm(self.target.embedded(step.input_ids))
        x = self.eh_proj(torch.cat([embedded, self.hnorm(features)], dim=-1))
        stream = ResidualStream(behind_first(x, step.positions))
        self.layer(stream, step.kv_caches[0], self.kinds.inputs(step)[0])
        step.on_layer(0)
        return stream.read(None)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.target.compute_logits(self.norm(hidden))

    def checkpoint_weights(self) -> Iterator[CheckpointWeight]:
        for norm, name in (
            (self.enorm, "enorm"),
            (self.hnorm, "hnorm"),
            (self.norm, "shared_head.norm"),
        ):
            yield from norm.checkpoint_weights(f"{self.name}.{name}")
        yield from self.eh_proj.checkpoint_weights(f"{self.name}.eh_proj")
        yield from self.layer.checkpoint_weights(self.name)

    @property
    def may_have_stacked_experts(self) -> bool:
        return self.target.may_have_stacked_experts

    @property
    def unused_weights(self) -> frozenset[str]:
        """Returns the names of the model itself, which has read its own, and of what it shares."""
        last = self.index + self.num_extra_layers
        others = {f"model.layers.{i}." for i in range(last) if i != self.index}
        shared = {f"{self.name}.embed_tokens.", f"{self.name}.shared_head.head."}
        whole = {"model.embed_tokens.", "model.norm.", "lm_head.", *self.spec.other_weights}
        return frozenset(others | shared | whole)
