"""Medusa heads: the k-th guesses the token k places behind the next one, from one feature.

head k: logits of W(x + SiLU(V x)), maybe with several such blocks. Source: arXiv 2401.10774.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from engine.config import DraftModel, EngineConfig
from engine.layers.linear import ReplicatedLinear
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.vocabulary.embedding import LMHead
from engine.models.base import CausalLM, ForwardInputs
from engine.models.drafts.base import DraftNetwork


class MedusaHeads(DraftNetwork):
    """Heads without layers that attend: `head_logits` needs a feature and nothing else."""

    def __init__(
        self,
        config: EngineConfig,
        draft: DraftModel,
        shard: Shard,
        target: CausalLM,
    ) -> None:
        super().__init__(target)
        options, size = draft.options, draft.feature_size
        self.prefix: str = options["prefix"]
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                ReplicatedLinear(size, size, shard.at(f"blocks.{i}"), bias=options["bias"])
                for _ in range(options["num_layers"])
            )
            for i in range(options["num_heads"])
        )
        self.heads = nn.ModuleList(
            LMHead(draft.vocab_size, size, shard.at(f"lm_heads.{i}"))
            for i in range(options["num_heads"])
        )

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    def head_logits(self, head: int, features: Tensor) -> Tensor:
        """Computes [S, F] -> float32 [S, vocabulary], of the token `head` + 1 behind the next."""
        x = features
        layers = self.blocks[head]
        assert isinstance(layers, nn.ModuleList)
        for layer in layers:
            x = x + F.silu(layer(x))
        logits: Tensor = self.heads[head](x)
        return logits

    def forward(self, step: ForwardInputs, features: Tensor) -> Tensor:
        return features

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.head_logits(0, hidden)

    def checkpoint_weights(self) -> Iterator[CheckpointWeight]:
        for i, (layers, head) in enumerate(zip(self.blocks, self.heads, strict=True)):
            assert isinstance(layers, nn.ModuleList)
            for j, layer in enumerate(layers):
                assert isinstance(layer, ReplicatedLinear)
                yield from layer.checkpoint_weights(f"{self.prefix}blocks.{i}.layers.{j}")
            assert isinstance(head, LMHead)
            yield from head.checkpoint_weights(f"{self.prefix}lm_heads.{i}")
