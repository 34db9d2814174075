"""Says how kernels of the gated delta rule are launched; `bench.engine.delta --tune` times more."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeltaTuning:
    """How one kernel is launched.

    Attributes:
        values: Columns of a state in one program.
    """

    values: int
    num_warps: int
    num_stages: int = 1


def decode_tuning() -> DeltaTuning:
    """Returns that of tokens one by one."""
    return DeltaTuning(values=32, num_warps=4)


def walk_tuning(dtype: torch.dtype) -> DeltaTuning:
    """Returns that of the walk through a prompt's chunks."""
    return DeltaTuning(values=32, num_warps=4, num_stages=1 if dtype == torch.float32 else 2)
