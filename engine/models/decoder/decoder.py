"""The decoder that all architectures share; `DenseSpec` states what differs.

ids ─ embed ─┬─ norm ─ qkv ─ rope, cache, attend ─ o ─(+)─ norm ─ gate·up ─ down ─(+) ... norm
             └────────────────── residual stream ──────────────────────────────┘

Some have a norm in front of each (+), some no norm behind the stream.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from engine.config import EngineConfig
from engine.layers.norm import RMSNorm
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.vocabulary.embedding import LMHead, VocabParallelEmbedding
from engine.layers.vocabulary.vocab_part import VocabCut, VocabPart
from engine.models.base import CausalLM, ForwardInputs
from engine.models.decoder.decoder_layer import DecoderLayer
from engine.models.decoder.embeddings import inputs_by_layer, layer_inputs, scaled
from engine.models.decoder.layer_kinds import LayerKinds
from engine.models.decoder.streams import Streams
from engine.models.specs.dense import DenseSpec
from engine.models.weights.stacked_experts import StackableExperts, stackable_experts
from engine.models.weights.stage_weights import has_embedding, unread_weights, weights_of_others


class Decoder(CausalLM):
    """[T] token ids -> [T, H] -> logits [S, vocabulary]: embedding, layers, head."""

    def __init__(self, config: EngineConfig, spec: DenseSpec, shard: Shard) -> None:
        super().__init__()
        model = config.model
        self.spec = spec
        self.place, self.link = shard.place, shard.place.pp
        self.has_embedding = has_embedding(self.link, is_tied=spec.tie_word_embeddings)
        shared = None
        if self.has_embedding:
            at = shard.at("model.embed_tokens")
            self.embed_tokens = VocabParallelEmbedding(model.vocab_size, spec.hidden_size, at)
            shared = self.embed_tokens.weight if spec.tie_word_embeddings else None
        self.layer_indices = shard.place.layers
        self.num_layers = model.num_layers
        self.layers = nn.ModuleList(
            DecoderLayer(config, spec, shard.at(f"model.layers.{index}"), index)
            for index in self.layer_indices
        )
        if self.link.is_last:
            offset = spec.offset_of_last_norm
            self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, shard, offset=offset)
            sizes = model.vocab_size, spec.hidden_size, shard.at("lm_head")
            self.lm_head = LMHead(*sizes, shared, spec.logit_scale, spec.final_softcap or 0.0)
            self.keeps_rows = self.link.is_first and bool(self.layers[-1].keeps_rows)
        self.streams = Streams(spec, shard, model.num_layers)
        self.inputs = layer_inputs(model, spec, shard)
        self.kinds = LayerKinds(config, spec, self.layer_indices, shard.device)

    def forward(self, step: ForwardInputs) -> Tensor:
        inputs, ids, link = self.kinds.inputs(step), step.input_ids, self.link
        rows = self.embedded(ids) if link.is_first else link.receive(len(ids), self.streams.like)
        stream = self.streams.begin(rows) if link.is_first else self.streams.resumed(rows)
        if (images := step.images) is not None and self.link.is_first:
            ids = images.begin(stream, ids)
        given = inputs_by_layer(self.inputs, ids, stream.sum, len(self.layers))
        for index, (layer, place) in enumerate(zip(self.layers, self.kinds.caches, strict=True)):
            step.tap(index, stream)
            kept = step.kept if layer is self.layers[-1] else None
            layer(stream, step.kv_caches[place], inputs[index], kept, given[index])
            if images is not None:
                images.follow(stream, self.layer_indices[index])
            if place == index:
                step.on_layer(index)
        step.tap(len(self.layers), stream)
        if self.link.is_last:
            return self.streams.normed(stream, self.norm)
        return self.link.send(stream.value())

    def embedded(self, input_ids: Tensor) -> Tensor:
        return scaled(self.embed_tokens(input_ids), self.spec)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head.part(hidden).whole()

    @property
    def vocab_cut(self) -> VocabCut | None:
        return self.lm_head.cut if self.link.is_last and self.lm_head.may_stay_split else None

    def compute_choices(self, hidden: Tensor) -> Tensor | VocabPart:
        return self.lm_head.part(hidden) if self.vocab_cut else self.compute_logits(hidden)

    def checkpoint_weights(self) -> Iterator[CheckpointWeight]:
        if self.has_embedding:
            yield from self.embed_tokens.checkpoint_weights("model.embed_tokens")
        if self.inputs is not None:
            yield from self.inputs.checkpoint_weights("model")
        for index, layer in zip(self.layer_indices, self.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            yield from layer.checkpoint_weights(f"model.layers.{index}")
        if not self.link.is_last:
            return
        yield from self.streams.checkpoint_weights("model")
        yield from self.norm.checkpoint_weights("model.norm")
        if not self.spec.tie_word_embeddings:
            yield from self.lm_head.checkpoint_weights("lm_head")

    @property
    def stackable_experts(self) -> StackableExperts | None:
        return stackable_experts(self.spec)

    @property
    def elsewhere(self) -> frozenset[str]:
        return weights_of_others(self.place, self.num_layers, is_tied=self.spec.tie_word_embeddings)

    @property
    def unused_weights(self) -> frozenset[str]:
        return unread_weights(self.spec, self.num_layers)
