"""EAGLE-3: one layer that reads an embedding and three streams of the model, fused to one feature.

    token ─ embed ─ norm ─────────┐
    taps ─ fc ─ feature ─┬─ norm ─┴─ qkv, attend, o ─(+)─ norm ─ gate·up, down ─(+)─ norm ─ head
                         └─ residual stream ──────────┴─────────────────────────┘

Its head has a vocabulary of its own, a part of the model's. Source: arXiv 2503.01840. Heads of
speculators may have norms in front of `fc`, over all taps or over each, and give the next draft the
normed stream for a feature.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.config import DraftModel, EngineConfig
from engine.layers.attention.block import AttentionBlock, AttentionOptions
from engine.layers.attention.layer import AttentionInputs
from engine.layers.feed_forward.mlp import GatedMLP
from engine.layers.linear import ReplicatedLinear
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.vocabulary.embedding import LMHead
from engine.models.base import CausalLM, ForwardInputs
from engine.models.decoder.layer_kinds import LayerKinds
from engine.models.drafts.base import DraftNetwork, behind_first
from engine.models.files.index_numbers import check_indices
from engine.models.specs.llama import LlamaSpec

_INTEGERS = frozenset({"I64", "I32"})


class Eagle3Head(DraftNetwork):
    """The layer above."""

    def __init__(
        self,
        config: EngineConfig,
        draft: DraftModel,
        spec: LlamaSpec,
        shard: Shard,
        target: CausalLM,
    ) -> None:
        super().__init__(target)
        model, size, prefix = draft.model, spec.hidden_size, draft.options["layer"]
        at = shard.at(prefix)
        self.prefix = prefix
        self.norm_before_residual: bool = draft.options["norm_before_residual"]
        self.sizes = draft.vocab_size, config.model.vocab_size
        self.fc = ReplicatedLinear(len(draft.taps) * size, size, shard.at("fc"))
        self.norm_output: bool = draft.options["norm_output"]
        eps = spec.rms_norm_eps
        self.taps_norm: RMSNorm | None = None
        if draft.options["norm_before_fc"]:
            self.taps_norm = RMSNorm(len(draft.taps) * size, eps, shard)
        count = len(draft.taps) if draft.options["fc_norm"] else 0
        self.tap_norms = nn.ModuleList(RMSNorm(size, eps, shard) for _ in range(count))
        self.input_norm, self.hidden_norm, self.mlp_norm, self.norm = (
            RMSNorm(size, eps, shard) for _ in range(4)
        )
        self.self_attn = AttentionBlock(
            size,
            model.heads_of(0),
            at.at("self_attn"),
            AttentionOptions(bias=spec.attention_bias, head_norm=spec.head_norm, eps=eps),
            input_size=2 * size,
        )
        self.mlp = GatedMLP(size, spec.intermediate_size, at.at("mlp"))
        self.lm_head = LMHead(draft.vocab_size, size, shard.at("lm_head"))
        self.distances: torch.nn.Parameter | None = None
        if draft.options["has_map"]:
            self.distances = shard.parameter(draft.vocab_size, dtype=torch.int64)
            self.distances.zero_()
        self.reads_map: bool = draft.options["reads_map"]
        self.kinds = LayerKinds(config, spec, [0], shard.device)

    def features(self, hidden: Tensor, taps: list[Tensor]) -> Tensor:
        x = torch.cat(taps, dim=-1)
        if self.taps_norm is not None:
            x = self.taps_norm(x)
        if self.tap_norms:
            parts = zip(self.tap_norms, x.chunk(len(taps), dim=-1), strict=True)
            x = torch.cat([norm(part.contiguous()) for norm, part in parts], dim=-1)
        fused: Tensor = self.fc(x)
        return fused

    def forward(self, step: ForwardInputs, features: Tensor) -> Tensor:
        embedded = self.input_norm(self.target.embedded(step.input_ids))
        normed = self.hidden_norm(features)
        x = behind_first(torch.cat([embedded, normed], dim=-1), step.positions)
        stream = ResidualStream(normed if self.norm_before_residual else features)
        (inputs,) = self.kinds.inputs(step)
        assert isinstance(inputs, AttentionInputs)
        self.self_attn(x, stream, step.kv_caches[0], inputs)
        self.mlp(stream.read_rows(self.mlp_norm, self.mlp.input_form), stream)
        step.on_layer(0)
        return stream.read(self.norm if self.norm_output else None)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden if self.norm_output else self.norm(hidden))
        if self.distances is None:
            return logits
        own, whole = self.sizes
        token_ids = torch.arange(own, device=logits.device) + self.distances
        found = logits.new_full((len(logits), whole), float("-inf"))
        return found.index_copy_(1, token_ids, logits)

    def checkpoint_weights(self) -> Iterator[CheckpointWeight]:
        yield from self.fc.checkpoint_weights("fc")
        for norm, name in (
            (self.input_norm, f"{self.prefix}.input_layernorm"),
            (self.hidden_norm, f"{self.prefix}.hidden_norm"),
            (self.mlp_norm, f"{self.prefix}.post_attention_layernorm"),
            (self.norm, "norm"),
        ):
            yield from norm.checkpoint_weights(name)
        if self.taps_norm is not None:
            yield from self.taps_norm.checkpoint_weights("input_norm")
        for index, tap_norm in enumerate(self.tap_norms):
            assert isinstance(tap_norm, RMSNorm)
            yield from tap_norm.checkpoint_weights(f"fc_norm.{index}")
        yield from self.self_attn.checkpoint_weights(f"{self.prefix}.self_attn", is_fused=False)
        yield from self.mlp.checkpoint_weights(f"{self.prefix}.mlp", is_fused=False)
        yield from self.lm_head.checkpoint_weights("lm_head")
        if self.distances is not None and self.reads_map:
            shape = tuple(self.distances.shape)
            own, whole = self.sizes
            yield CheckpointWeight(
                "d2t", self.distances, shape, stored=_INTEGERS, below=whole - own + 1,
                fill=self._fill_map,
            )  # fmt: skip

    def _fill_map(self, distances: Tensor) -> None:
        """Raises `CheckpointError`: `distances` lead to tokens that the target does not have."""
        assert self.distances is not None
        token_ids = distances + torch.arange(len(distances), device=distances.device)
        check_indices("d2t", token_ids, self.sizes[1])
        self.distances.copy_(distances)

    @property
    def unused_weights(self) -> frozenset[str]:
        return frozenset({"embed_tokens.", "t2d", "d2t"})
