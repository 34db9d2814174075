"""One rank's share of a model, and which part of the checkpoint it is filled from.

Layers allocate their parameters through a `Shard` and name their sources as `CheckpointWeight`s.
A model's list of sources is complete: what it does not name must not be in the checkpoint, and
what it names must be. The loader only carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from engine.distributed import ParallelGroup
from engine.layers.gemm_policy import GemmPolicy
from engine.parallel import ParallelPlace


@dataclass(frozen=True, slots=True)
class CheckpointWeight:
    """`target` is filled from the checkpoint's tensor `name`, or from a slice of it.

    Attributes:
        shape: The whole tensor's, as the checkpoint must have it.
        dim: The dimension that is sliced; None: `target` takes the whole tensor.
        start: First index of the slice. `target` says how many there are.
        order: [rows of `target`] int64 or None: row i is row `order[i]` of the slice.
        offset: Added to what the checkpoint holds.
    """

    name: str
    target: Tensor
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    order: Tensor | None = None
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Shard:
    """Describes one rank's share, and where it lives, to the layers that allocate it."""

    place: ParallelPlace
    dtype: torch.dtype
    device: torch.device
    gemms: GemmPolicy = field(default_factory=GemmPolicy)

    @property
    def tp(self) -> ParallelGroup:
        return self.place.tp

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Returns an uninitialised parameter; the loader fills it. None: of the model's dtype."""
        empty = torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(empty, requires_grad=False)

    def part(self, total: int) -> tuple[int, int]:
        """Returns (start, count) of this rank's equal part.

        Raises:
            ValueError: `total` has no equal parts.
        """
        if total % self.tp.size:
            raise ValueError(f"{total} cannot be shared by {self.tp.size} ranks")
        count = total // self.tp.size
        return self.tp.rank * count, count

    def part_of_units(self, total: int, unit: int) -> tuple[int, int]:
        """Returns (start, count) of this rank's part, cut at multiples of `unit`: parts are equal,
        or else as equal as whole units allow, the larger ones first.

        Raises:
            ValueError: There is not a unit for each rank.
        """
        size, rank = self.tp.size, self.tp.rank
        if total % (size * unit) == 0 or unit == 1:
            return self.part(total)
        units = -(-total // unit)
        if units < size:
            raise ValueError(f"{total} in units of {unit} cannot be shared by {size} ranks")
        each, more = divmod(units, size)
        start = (rank * each + min(rank, more)) * unit
        return start, min((each + (rank < more)) * unit, total - start)
