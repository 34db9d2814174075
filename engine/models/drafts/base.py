"""The contract between the engine and a drafter with weights.

A drafter that attends has layers with keys and values of its own. At position p they read token p
and the feature of position p - 1: what the other model has made of all tokens before. So what they
keep of position p depends on the tokens up to p alone, as all KV does, and hits of the prefix cache
stay right. Position 0 has no feature: its keys and values are those of a vector of zeros.

    1. `features`         of the T tokens of a step that the other model has computed
    2. `forward`          of the same tokens: their keys and values, from true features
    3. `forward`          of one token a row, the newest: `compute_logits` gives its draft
    4. `forward`          of that draft, with the output of 3 for a feature; and so on

Some drafters are a `chain` of networks with layers of their own. The second one's feature of a
token is what the first has made of it, the third one's what the second has, so that each guesses
one token further ahead:

    token p, the model's feature of p - 1  ─▶ first  ─▶ guesses p + 1
    token p, first's output at p - 1       ─▶ second ─▶ guesses p + 1, from the feature of p - 2

All of them compute a step's tokens in 2, with one feature each; in 3 as many as have a draft left
to make compute the newest token, and the first of them gives its draft; in 4 those behind it do,
each with what the one before has made in 3. The last one gives all drafts that are left, with its
own outputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from engine.layers.feed_forward.sparse_mlp import SparseMLP
from engine.layers.shard import CheckpointWeight
from engine.models.base import CausalLM, ForwardInputs
from engine.models.weights.stacked_experts import StackableExperts


class DraftNetwork(nn.Module):
    """One rank's share of a drafter. `target`: the model that it drafts for, whose embedding and
    head it may use."""

    def __init__(self, target: CausalLM) -> None:
        super().__init__()
        self._targets = (target,)  # Not a submodule: its weights are loaded by themselves.

    @property
    def target(self) -> CausalLM:
        return self._targets[0]

    @property
    def chain(self) -> Sequence[DraftNetwork]:
        """Returns the networks that guess one behind the other: mostly this one alone."""
        return (self,)

    @property
    def expert_blocks(self) -> Sequence[SparseMLP]:
        """Returns the blocks of this network alone that have experts, in the order in which it
        computes them."""
        return [block for block in self.modules() if isinstance(block, SparseMLP)]

    @property
    def chooses_once(self) -> bool:
        """Returns whether all passes attend to what the first one of them has chosen."""
        return False

    def features(self, hidden: Tensor, taps: list[Tensor]) -> Tensor:
        """Returns [T, F] of the other model's output [T, H] and of its tapped streams."""
        return hidden

    @abstractmethod
    def forward(self, step: ForwardInputs, features: Tensor) -> Tensor:
        """Computes [T] token ids and the features [T, F] of the tokens before them, which it may
        overwrite -> [T, F], what the next token takes for a feature."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Computes [S, F] -> float32 [S, vocabulary of the other model], alike on every rank."""

    @abstractmethod
    def checkpoint_weights(self) -> Iterator[CheckpointWeight]:
        """Yields every tensor that the checkpoint must have, and where it goes."""

    @property
    def stackable_experts(self) -> StackableExperts | None:
        """Returns the experts that a checkpoint may have in one tensor a layer."""
        return None

    @property
    def elsewhere(self) -> frozenset[str]:
        """Returns nothing: every rank that drafts has all of the drafter."""
        return frozenset()

    @property
    def unused_weights(self) -> frozenset[str]:
        """Returns names of tensors that a checkpoint may have and this does not read, as
        `CausalLM.unused_weights` does."""
        return frozenset()


def behind_first(x: Tensor, positions: Tensor, ahead: int = 1) -> Tensor:
    """Returns `x` [T, N] with zeros where no token is `ahead` places before."""
    return x.masked_fill((positions < ahead).unsqueeze(1), 0)
