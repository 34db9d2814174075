"""How a GEMM with adapters is cut into programs.

What counts is that all of them run at once: one that comes when others have left is late by all
that it does. Programs are so small that two fit an SM. A layer whose tiles are just fewer than SMs
has one large program for each instead, with all of an SM's shared memory, and a layer with fewer
tiles several for each, by the inner dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_SMS = 132
"""An H100 and an H200 have so many."""
_LEAST_ALONE = 96
"""The fewest large programs, one on an SM: less would leave too many SMs without."""
_PROGRAMS = 2 * _SMS
"""The number that runs at once, two on an SM."""
_MOST_SPLITS = 4
_WIDE_COLUMNS = 256
"""The most columns of A beside tiles of 64 outputs, which spill registers with more."""
_FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class LoraGemmTuning:
    """Says how one GEMM runs.

    Attributes:
        cols, depth: Outputs of a program, and how much of the inner dimension it takes at once.
        shrink_programs: About so many multiply by A.
        splits: So many programs share a tile, each with a part of the inner dimension.
        ahead: The others look for what these left so many steps before their last one, while the
            weights of those are on their way.
    """

    cols: int = 32
    depth: int = 256
    num_warps: int = 4
    num_stages: int = 5
    shrink_programs: int = 48
    splits: int = 1
    ahead: int = 4


def lora_gemm_tuning(
    num_rows: int, num_outputs: int, num_columns: int, gated: bool
) -> LoraGemmTuning:
    """Returns what was fastest for so many outputs, of those that `python -m
    bench.engine.lora_gemms` times.

    Args:
        num_columns: Of A, of all slots together.
    """
    deep = num_rows <= _FEW_ROWS
    depth = 256 if deep else 128
    tiles = num_outputs // 32
    if gated:
        if tiles + 16 <= _PROGRAMS or num_columns > _WIDE_COLUMNS:
            return LoraGemmTuning(depth=depth, num_stages=3, shrink_programs=16, ahead=8)
        return LoraGemmTuning(cols=64, depth=128, num_stages=3, shrink_programs=32, ahead=8)
    columns = -(-num_columns // 32)
    if deep and tiles >= _LEAST_ALONE and tiles + columns <= _SMS:
        return LoraGemmTuning(depth=512, num_stages=4, shrink_programs=columns, ahead=1)
    splits = max(1, min(_MOST_SPLITS, _PROGRAMS // tiles))
    if splits == 1:
        usual = LoraGemmTuning(depth=depth)
        places = max(columns, _PROGRAMS - tiles)
        return replace(usual, shrink_programs=min(usual.shrink_programs, places))
    if not deep:
        return LoraGemmTuning(depth=depth, num_stages=4, splits=splits, ahead=3)
    return LoraGemmTuning(depth=512, num_stages=3, shrink_programs=8, splits=splits, ahead=2)
