"""What one rank holds of a model, and which part of the checkpoint it is filled from.

Layers allocate their parameters through a `Shard` and name their sources as `CheckpointWeight`s.
A model's list of sources is complete: what it does not name must not be in the checkpoint, and
what it names must be. The loader only carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.distributed import TensorParallelGroup


@dataclass(frozen=True, slots=True)
class CheckpointWeight:
    """`target` is filled from the checkpoint's tensor `name`, or from a slice of it.

    Attributes:
        shape: The whole tensor's, as the checkpoint must have it.
        dim: The dimension that is sliced; None: `target` takes the whole tensor.
        start: First index of the slice. `target` says how many there are.
    """

    name: str
    target: Tensor
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share, and where it lives.

    Attributes:
        deterministic: A row of a product does not depend on the others.
        narrow_rows: Column layers compute at most so many rows by kernels of our own.
        gated_rows: From so many rows on, gate·up and its activation are one product of our own; 0:
            never.
        residual_rows: From so many rows on, row layers add to the residual stream themselves; 0:
            never.
    """

    group: TensorParallelGroup
    dtype: torch.dtype
    device: torch.device
    deterministic: bool = False
    narrow_rows: int = 0
    gated_rows: int = 0
    residual_rows: int = 0

    def parameter(self, *shape: int) -> nn.Parameter:
        """Uninitialised; the loader fills it."""
        empty = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(empty, requires_grad=False)

    def part(self, total: int) -> tuple[int, int]:
        """(start, count) of this rank's equal part.

        Raises:
            ValueError: `total` has no equal parts.
        """
        if total % self.group.size:
            raise ValueError(f"{total} cannot be shared by {self.group.size} ranks")
        count = total // self.group.size
        return self.group.rank * count, count
