"""How a GEMM with adapters is cut into programs.

What counts is that all of them run at once: one that comes when others have left is late by all
that it does. Programs are so small that two fit an SM. A layer whose tiles are just fewer than SMs
has one large program for each instead. It takes more than half of an SM's shared memory, since of
programs that begin while the kernel in front still runs two would share an SM, and leave another
without. A layer with fewer tiles has several for each, by the inner dimension. The numbers
are in `tunings/*/lora_gemm.json`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tandem_kernels.tunings.table import TuningTable


@dataclass(frozen=True, slots=True)
class LoraGemmTuning:
    """Says how one GEMM runs.

    Attributes:
        cols, depth: Outputs of a program, and how much of the inner dimension it takes at once.
        shrink_programs: About this many multiply by A.
        splits: This many programs share a tile, each with a part of the inner dimension.
        ahead: The others look for what these left this many steps before their last one, while the
            weights of those are on their way.
    """

    cols: int = 32
    depth: int = 256
    num_warps: int = 4
    num_stages: int = 5
    shrink_programs: int = 48
    splits: int = 1
    ahead: int = 4


@dataclass(frozen=True, slots=True)
class _LoraPrograms:
    """Says how programs compute their tile, and how many of them there are.

    Attributes:
        tuning: Of which `shrink_programs` are the most.
        programs: This many run at once.
        most_splits: Programs of a tile, while no more than `programs` have one.
        fills: This many places are filled by those that multiply by A, of which there is one for
            32 columns at least; None: there are `shrink_programs`.
    """

    tuning: LoraGemmTuning
    programs: int
    most_splits: int = 1
    fills: int | None = None


def _fit(
    taken: _LoraPrograms, num_rows: int, tiles: int, columns: int, alone: int, gated: bool
) -> LoraGemmTuning:
    splits = max(1, min(taken.most_splits, taken.programs // tiles))
    shrinks = taken.tuning.shrink_programs
    if taken.fills is not None:
        shrinks = min(shrinks, max(columns, taken.fills - tiles))
    return replace(taken.tuning, splits=splits, shrink_programs=shrinks)


_TABLE = TuningTable(
    "lora_gemm", _LoraPrograms, ("num_rows", "tiles", "columns", "alone", "gated"), _fit
)


def lora_gemm_tuning(
    device: torch.device, num_rows: int, num_outputs: int, num_columns: int, gated: bool
) -> LoraGemmTuning:
    """Returns the tiles that were fastest inside whole decode steps. Timed alone, larger tiles of
    gate and up win 2 us that steps do not see.

    Args:
        num_columns: Of A, of all slots together.
    """
    tiles, columns = num_outputs // 32, -(-num_columns // 32)
    return _TABLE.choose(device, num_rows, tiles, columns, tiles + columns, gated)
