"""Layers for multi-token prediction, as checkpoints have them behind their last one.

DeepSeek V3 and GLM 4.5 store `enorm`, `hnorm`, `eh_proj` and `shared_head.norm` with each, and
copies of the model's embedding and head. The k-th layer was trained to predict k tokens further
than the model does, from the output of the layer before it and the embedding of the token k places
on (DeepSeek V3's report, arXiv 2412.19437, section 2.2). So the k-th draft is the k-th layer's.

Qwen3-Next and Qwen3.5 have one layer, with attention, under names of their own. Their model takes
the normed output of a draft for the feature of the next one.

DeepSeek V4 has one, too, with a window alone. Its feature is what all layers have made of the
model's residual streams, which it goes on with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from engine.config import DraftModel, EngineConfig
from engine.layers.feed_forward.sparse_mlp import SparseMLP
from engine.layers.norm import RMSNorm
from engine.layers.shard import CheckpointWeight, Shard
from engine.models.base import CausalLM, ForwardInputs
from engine.models.decoder.decoder_layer import DecoderLayer
from engine.models.decoder.layer_kinds import LayerKinds
from engine.models.decoder.streams import Streams
from engine.models.drafts.ahead_input import AheadInput
from engine.models.drafts.base import DraftNetwork, behind_first
from engine.models.specs.dense import DenseSpec
from engine.models.weights.stacked_experts import StackableExperts


class MtpLayer(DraftNetwork):
    """layer(embedding and feature, see `AheadInput`), a norm, the model's head.

    `place`: which of the drafter's layers it is; the ones behind it are its own, in a row.
    """

    def __init__(
        self,
        config: EngineConfig,
        draft: DraftModel,
        spec: DenseSpec,
        shard: Shard,
        target: CausalLM,
        place: int = 0,
    ) -> None:
        super().__init__(target)
        self.place = place
        self.index: int = draft.options["index"] + place
        self.num_extra_layers = spec.num_extra_layers
        self.spec, self.names = spec, spec.ahead
        number = self.index if self.names.counts_on else place
        self.name = self.names.layer.format(number)
        self.number = number
        self.input = AheadInput(spec, number, shard)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, shard, offset=spec.norm_offset)
        self.streams = Streams(spec, shard, 1)
        self.layer = DecoderLayer(config, spec, shard.at(self.name), self.index)
        self.kinds = LayerKinds(config, spec, [self.index], shard.device, self.index - place)
        self.behind: MtpLayer | None = None
        if place + 1 < draft.num_layers:
            self.behind = MtpLayer(config, draft, spec, shard, target, place + 1)

    @property
    def chain(self) -> Sequence[DraftNetwork]:
        return (self,) if self.behind is None else (self, *self.behind.chain)

    @property
    def chooses_once(self) -> bool:
        return self.spec.drafts_choose_once and self.behind is None

    @property
    def expert_blocks(self) -> Sequence[SparseMLP]:
        return [block for block in self.layer.modules() if isinstance(block, SparseMLP)]

    def features(self, hidden: Tensor, taps: list[Tensor]) -> Tensor:
        return taps[0] if taps else hidden

    def forward(self, step: ForwardInputs, features: Tensor) -> Tensor:
        x = self.input(self.target.embedded(step.input_ids), features)
        stream = self.streams.resumed(behind_first(x, step.positions, 1 + self.place))
        self.layer(stream, step.kv_caches[self.place], self.kinds.inputs(step)[0])
        step.on_layer(self.place)
        return stream.normed(self.norm) if self.names.feeds_norm else stream.value()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        if not self.names.feeds_norm:
            hidden = self.streams.normed(self.streams.resumed(hidden), self.norm)
        return self.target.compute_logits(hidden)

    def checkpoint_weights(self) -> Iterator[CheckpointWeight]:
        yield from self.input.checkpoint_weights()
        yield from self.norm.checkpoint_weights(self.names.norm.format(self.number))
        yield from self.streams.checkpoint_weights(self.name)
        yield from self.layer.checkpoint_weights(self.name)
        if self.behind is not None:
            yield from self.behind.checkpoint_weights()

    @property
    def stackable_experts(self) -> StackableExperts | None:
        return self.target.stackable_experts

    @property
    def unused_weights(self) -> frozenset[str]:
        """Returns the names of the model itself, which has read its own, and of what it shares."""
        if not self.names.counts_on:
            return frozenset({"model.", "lm_head.", *self.spec.other_weights})
        own = range(self.index, self.index + len(self.chain))
        last = self.index + self.num_extra_layers
        others = {f"model.layers.{i}." for i in range(last) if i not in own}
        copies = "embed_tokens.", "shared_head.head."
        shared = {f"model.layers.{i}.{copy}" for i in own for copy in copies}
        whole = {"model.embed_tokens.", "model.norm.", "lm_head.", *self.spec.other_weights}
        return frozenset(others | shared | whole)
