"""The interface of expert methods: which tensors a layer's experts are, and how they compute.

    1. `create`                once: the layer gets its parameters, not yet loaded
    2. `checkpoint_weights`    names the checkpoint's tensors that fill one projection of an expert;
       `stacked_weights`       where it has those of all experts in one, all of a layer
    3. `apply`                 each step

A method keeps nothing of a layer. A new format is a method beside `plain.py`, chosen in
`choice.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from engine.layers.methods.registry import UnsupportedScheme
from engine.layers.shard import CheckpointWeight, Shard
from tandem_kernels.elementwise.gate_form import GateForm

Projection = Literal["gate", "up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The sizes of a layer's experts, and which of them, and which units of each, this rank has.

    Attributes:
        hidden: Numbers of a token.
        whole: Units of one expert, on all ranks together.
        start, width: This rank has units [start, start + width) of each of its experts.
        total: Experts of the checkpoint.
        held: Their numbers, by those that they have on this rank.
        has_gate: Else their first projection is `up` alone.
        ranks: As many share the experts, as a whole; 1: all are here.
    """

    hidden: int
    whole: int
    start: int
    width: int
    total: int
    held: tuple[int, ...]

    has_gate: bool = True
    ranks: int = 1

    @property
    def rows13(self) -> int:
        """Returns the outputs of an expert's first projections on this rank."""
        return (1 + self.has_gate) * self.width

    @property
    def count(self) -> int:
        """Returns how many experts this rank has."""
        return len(self.held)


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One projection of one expert, and where the checkpoint has it.

    Attributes:
        prefix: The checkpoint's name without a suffix, like
            "model.layers.0.mlp.experts.3.up_proj".
        expert: Its number on this rank.
    """

    prefix: str
    expert: int
    projection: Projection


class ExpertLayer(nn.Module):
    """Holds what methods give it.

    Attributes:
        sizes: Of the experts.
        fixed_order: A token gets the same bits whatever the others are.
        b13, b2: Biases [E, rows13], gate before up, and [E, H], if experts are slices on the first
            rank alone; or None.
        gate: None: SiLU.
    """

    sizes: ExpertSizes
    fixed_order: bool
    b13: nn.Parameter | None
    b2: nn.Parameter | None
    gate: GateForm | None
    w13: Tensor
    w2: Tensor
    s13: Tensor
    s2: Tensor
    f13: Tensor | None
    f2: Tensor | None
    packed13: Tensor
    groups13: Tensor
    packed2: Tensor
    groups2: Tensor


class ExpertMethod(ABC):
    """Computes a layer's experts in one way.

    Attributes:
        unit: This many units of an expert stay together: ranks are given multiples of it.
    """

    unit: int = 1

    @abstractmethod
    def create(self, layer: ExpertLayer, shard: Shard) -> None:
        """Gives the layer, which knows its sizes, its parameters, uninitialised."""

    @abstractmethod
    def checkpoint_weights(
        self, layer: ExpertLayer, part: ExpertPart
    ) -> Iterator[CheckpointWeight]:
        """Yields all tensors of the checkpoint that one projection of one expert is filled from."""

    def stacked_weights(self, layer: ExpertLayer, prefix: str) -> Iterator[CheckpointWeight]:
        """Yields all tensors of a checkpoint like gpt-oss', but biases; see `stacked`.

        Raises:
            UnsupportedScheme: This format is not known in that layout.
        """
        raise UnsupportedScheme(
            f"{prefix} is quantised in a way that is not supported for tensors of all experts: use "
            "another checkpoint of the model"
        )

    @abstractmethod
    def apply(
        self,
        layer: ExpertLayer,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        *,
        summed: bool = True,
    ) -> Tensor:
        """Returns the weighted sum of each token's experts, of this rank's units alone.

        Args:
            x: [T, H].
            weights: [T, k] float32.
            experts: [T, k] int32, as this rank numbers its own; -1: none.
            summed: Else outputs are left as `PairOutputs.parts`; where `leaves_sums` says so.

        Returns:
            [T, H]; or, not summed, [T * k, H].
        """

    def leaves_sums(self, layer: ExpertLayer, num_pairs: int) -> bool:
        """Returns whether outputs of this many (token, expert) pairs are summed by themselves."""
        return True

    def takes_beside(self, layer: ExpertLayer) -> bool:
        """Returns whether `apply_beside` computes few rows."""
        return False

    def apply_beside(
        self,
        layer: ExpertLayer,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        shared: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Does what `apply` does, not summed, [T * k, H], and computes in the same launches an
        expert of all tokens [T, H], whose plain weights are `shared`."""
        raise NotImplementedError

    def takes_logits(self, layer: ExpertLayer, num_rows: int, top_k: int) -> bool:
        """Returns whether `add_routed` computes this many rows."""
        return False

    def add_routed(
        self,
        layer: ExpertLayer,
        x: Tensor,
        logits: Tensor,
        slot_mapping: Tensor,
        residual: Tensor,
        top_k: int,
        *,
        renormalise: bool,
        scaling: float,
    ) -> None:
        """Chooses the experts of few rows, and adds what they compute to the residual stream.

        Args:
            x: [T, H].
            logits, slot_mapping, top_k, renormalise, scaling: See
                `tandem_kernels.reference.experts.route_tokens`.
            residual: [T, H], the stream, to which nothing else waits to be added.
        """
        raise NotImplementedError
