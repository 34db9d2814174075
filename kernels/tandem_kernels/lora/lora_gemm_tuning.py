"""How a GEMM with adapters is cut into programs.

What counts is that all of them run at once: one that comes when others have left is late by all
that it does. Of a layer with few outputs each tile is therefore several programs, by the inner
dimension, and tiles are so small that two or three programs fit an SM.
"""

from __future__ import annotations

from dataclasses import dataclass

_PROGRAMS = 256
"""About so many take a layer's weight, where it has fewer tiles: two an SM."""
_MOST_SPLITS = 4
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
    num_stages: int = 4
    shrink_programs: int = 32
    splits: int = 1
    ahead: int = 3


def lora_gemm_tuning(num_rows: int, num_outputs: int, gated: bool) -> LoraGemmTuning:
    """Returns what is likely best for so many columns of the result. `python -m
    bench.engine.lora_gemms` times others."""
    depth = 256 if num_rows <= _FEW_ROWS else 128
    if gated:
        return LoraGemmTuning(depth=depth, num_stages=3, shrink_programs=16, ahead=4)
    usual = LoraGemmTuning()
    splits = max(1, min(_MOST_SPLITS, _PROGRAMS * usual.cols // num_outputs))
    ahead = 3 if splits > 1 else 5
    return LoraGemmTuning(depth=depth, shrink_programs=48, splits=splits, ahead=ahead)
