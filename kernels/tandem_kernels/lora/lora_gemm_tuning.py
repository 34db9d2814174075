"""How a GEMM with adapters is cut into programs.

What counts is that all of them run at once: one that comes when others have left is late by all
that it does. Programs are so small that two fit an SM. A layer whose tiles are just fewer than SMs
has one large program for each instead. It takes more than half of an SM's shared memory, since of
programs that begin while the kernel in front still runs two would share an SM, and leave another
without. A layer with fewer tiles has several for each, by the inner dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

_SMS = 132
"""An H100 and an H200 have this many."""
_LEAST_ALONE = 96
"""The fewest large programs, one on an SM: less would leave too many SMs without."""
_PROGRAMS = 2 * _SMS
"""The number that runs at once, two on an SM."""
_MOST_SPLITS = 4
_MOST_SHRINKS = 48
_FEW_ROWS = 16


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
    shrink_programs: int = _MOST_SHRINKS
    splits: int = 1
    ahead: int = 4


def lora_gemm_tuning(
    num_rows: int, num_outputs: int, num_columns: int, gated: bool
) -> LoraGemmTuning:
    """Returns the tiles that were fastest inside whole decode steps. Timed alone, larger tiles of
    gate and up win 2 us that steps do not see.

    Args:
        num_columns: Of A, of all slots together.
    """
    deep = num_rows <= _FEW_ROWS
    depth = 256 if deep else 128
    if gated:
        return LoraGemmTuning(depth=depth, num_stages=3, shrink_programs=16, ahead=8)
    tiles = num_outputs // 32
    columns = -(-num_columns // 32)
    if deep and tiles >= _LEAST_ALONE and tiles + columns <= _SMS:
        return LoraGemmTuning(depth=512, num_stages=4, shrink_programs=columns, ahead=1)
    splits = max(1, min(_MOST_SPLITS, _PROGRAMS // tiles))
    if splits == 1:
        places = max(columns, _PROGRAMS - tiles)
        return LoraGemmTuning(depth=depth, shrink_programs=min(_MOST_SHRINKS, places))
    if not deep:
        return LoraGemmTuning(depth=depth, num_stages=4, splits=splits, ahead=3)
    return LoraGemmTuning(depth=512, num_stages=3, shrink_programs=8, splits=splits, ahead=2)
