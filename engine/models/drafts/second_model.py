"""A small model of the same vocabulary that drafts for a larger one.

Source: Leviathan et al., Speculative Decoding (arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from engine.layers.shard import CheckpointWeight
from engine.models.base import CausalLM, ForwardInputs
from engine.models.drafts.base import DraftNetwork
from engine.models.weights.stacked_experts import StackableExperts


class SecondModel(DraftNetwork):
    """Any `CausalLM`, which needs no features ([T, 0]): its output [T, H] is the next token's."""

    def __init__(self, model: CausalLM, target: CausalLM) -> None:
        super().__init__(target)
        self.model = model

    def features(self, hidden: Tensor, taps: list[Tensor]) -> Tensor:
        return hidden[:, :0]

    def forward(self, step: ForwardInputs, features: Tensor) -> Tensor:
        hidden: Tensor = self.model(step)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.model.compute_logits(hidden)

    def checkpoint_weights(self) -> Iterator[CheckpointWeight]:
        yield from self.model.checkpoint_weights()

    @property
    def stackable_experts(self) -> StackableExperts | None:
        return self.model.stackable_experts

    @property
    def unused_weights(self) -> frozenset[str]:
        return self.model.unused_weights
