"""One rank's share of a model, and which part of the checkpoint it is filled from.

Layers allocate their parameters through a `Shard` and name their sources as `CheckpointWeight`s.
A model's list of sources is complete: what it does not name must not be in the checkpoint, and
what it names must be. The loader only carries it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from engine.layers.gemm_policy import GemmPolicy
from engine.parallel.distributed import ParallelGroup
from engine.parallel.place import ParallelPlace
from engine.quantization import Quantization, Scheme

FLOATS = frozenset({"F32", "F16", "BF16"})
"""Types of numbers, as safetensors names them, that weights may be stored in."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A tensor of the checkpoint, or a slice of it.

    Attributes:
        shape: The whole tensor's, as the checkpoint must have it.
        dim: The dimension that is sliced; None: the whole tensor.
        start, count: Of the slice.
        index: Of the first dimension, which the slice then lacks, and `dim` counts without.
        stored: Types of numbers that the checkpoint may have it in.
        dummy: What every element of dummy weights is; None: random numbers.
        below: Whole numbers that index something are from 0 to below this; None: any numbers.
        is_optional: Some checkpoints lack it; what is filled is then given one tensor less. Only
            the last of a parameter's.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    count: int = 0
    stored: frozenset[str] = FLOATS
    dummy: float | None = None
    below: int | None = None
    index: int | None = None
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointWeight:
    """`target` is filled from the checkpoint's tensor `name`, or from a slice of it.

    Attributes:
        shape: The whole tensor's, as the checkpoint must have it.
        dim: The dimension that is sliced; None: `target` takes the whole tensor.
        start: First index of the slice. `target` says how many there are.
        order: [rows of `target`] int64 or None: row i is row `order[i]` of the slice.
        offset: Added to what the checkpoint holds.
        stored: Types of numbers that the checkpoint may have it in.
        companions: Other tensors that are read with it, like scales.
        count: Indices of the slice where the target does not say it: `fill` changes the shape.
        index, below: See `TensorSlice`.
        fill: Fills the target instead of a copy; it is given the slice and those of the companions,
            as stored, on the target's device. `order` and `offset` are left to it.
        beside: Names of tensors that may be in the checkpoint as well and are not needed.
    """

    name: str
    target: Tensor
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    order: Tensor | None = None
    offset: float = 0.0
    stored: frozenset[str] = FLOATS
    companions: tuple[TensorSlice, ...] = ()
    count: int | None = None
    index: int | None = None
    below: int | None = None
    fill: Callable[..., object] | None = None
    beside: tuple[str, ...] = ()

    @property
    def slices(self) -> tuple[TensorSlice, ...]:
        """Returns what is read of the checkpoint: the tensor itself, then its companions."""
        count = self.count
        if count is None:
            count = 0 if self.dim is None else self.target.shape[self.dim]
        own = TensorSlice(
            self.name, self.shape, self.dim, self.start, count, self.stored,
            index=self.index, below=self.below,
        )  # fmt: skip
        return (own, *self.companions)


def unread(weight: CheckpointWeight) -> CheckpointWeight:
    """Returns the source of a parameter that other ranks have, with all that belongs to it: the
    checkpoint must have it, and nothing of it is read."""
    companions = tuple(replace(part, dim=None, start=0, count=0) for part in weight.companions)
    target, stored = torch.empty(0, *weight.shape[1:]), weight.stored
    return CheckpointWeight(
        weight.name, target, weight.shape, 0, stored=stored, companions=companions,
        beside=weight.beside,
    )  # fmt: skip


def nothing_of(name: str, shape: tuple[int, ...]) -> CheckpointWeight:
    """Returns the source of a parameter that other ranks have: it must be in the checkpoint, and
    nothing of it is read."""
    return CheckpointWeight(name, torch.empty(0, *shape[1:]), shape, 0)


@dataclass(frozen=True, slots=True)
class Shard:
    """Describes one rank's share, and where it lives, to the layers that allocate it.

    Attributes:
        prefix: The checkpoint's name of the module that is being built.
    """

    place: ParallelPlace
    dtype: torch.dtype
    device: torch.device
    gemms: GemmPolicy = field(default_factory=GemmPolicy)
    quantization: Quantization | None = None
    prefix: str = ""

    def at(self, name: str) -> Shard:
        """Returns the share of a module inside this one."""
        return replace(self, prefix=f"{self.prefix}.{name}" if self.prefix else name)

    def scheme(self, *names: str) -> Scheme | None:
        """Returns how the modules inside this one, or without names itself, are quantised.

        Raises:
            MixedSchemes: They do not share a scheme.
        """
        if self.quantization is None:
            return None
        full = [self.at(name).prefix for name in names] or [self.prefix]
        return self.quantization.scheme_of(*full)

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
        """Returns (start, count) of this rank's part of every expert, cut at multiples of `unit`:
        parts are equal, or else as equal as whole units allow, the larger ones first.

        Raises:
            ValueError: There is not a unit for each rank.
        """
        ranks = self.place.expert_ranks
        if total % ranks.size and unit == 1:
            raise ValueError(f"{total} cannot be shared by {ranks.size} ranks")
        return part_of(total, unit, ranks.rank, ranks.size)


def part_of(total: int, unit: int, rank: int, size: int) -> tuple[int, int]:
    """Returns (start, count) of a rank's part of `total`: parts are equal, or else as equal as
    whole units allow, the larger ones first.

    Raises:
        ValueError: There is not a unit for each rank.
    """
    if total % (size * unit) == 0:
        return rank * (total // size), total // size
    units = -(-total // unit)
    if units < size:
        raise ValueError(f"{total} in units of {unit} cannot be shared by {size} ranks")
    each, more = divmod(units, size)
    start = (rank * each + min(rank, more)) * unit
    return start, min((each + (rank < more)) * unit, total - start)
