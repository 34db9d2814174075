"""Says for which steps the experts of a few rows are multiplied a warp at a time, and how."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_kernels.device import has_warpgroup_mma
from tandem_kernels.elementwise.gate_form import GateForm
from tandem_kernels.gemm.fp4_tiles import SIDE, TILE_WORDS
from tandem_kernels.tunings.table import plain_table

_GATES = ("silu", "clamped", "limited", "capped")
_MOST_ROWS, _MOST_PAIRS = 8, 32
"""Columns of a product, and lanes of a warp, of which each has a pair."""


@dataclass(frozen=True, slots=True)
class ExpertWarpTuning:
    """Says how the first GEMM runs.

    Attributes:
        warps: Of a program.
        ahead: Tiles whose words a warp has asked for before it multiplies.
        strips: Of a program, 1 or 2, each 16 outputs of gate and of up.
        registers: Of a thread at most.
        least_pairs: With fewer (token, expert) pairs, programs that share all tiles out evenly
            (`even_runs`) are faster.
    """

    warps: int
    ahead: int
    strips: int
    registers: int
    least_pairs: int


_TABLE = plain_table("fp4_few_rows", ExpertWarpTuning, ("width", "hidden"))


def expert_warp_tuning(device: torch.device, width: int, hidden: int) -> ExpertWarpTuning:
    """Chooses for experts [hidden] -> [width]."""
    return _TABLE.choose(device, width, hidden)


def takes_few_rows(
    x: Tensor, weight: Tensor, experts: Tensor, width: int, gate: GateForm | None = None
) -> bool:
    """Returns whether `fp4_few_row_gate_up` computes this GEMM, and is the fastest: the first one,
    of a few tokens in bf16 on Hopper, and weights in MXFP4 whose tiles are full. `experts`: [T, k],
    those of each token."""
    return (
        weight.shape[1] == 2
        and weight.shape[-1] == TILE_WORDS
        and x.dtype == torch.bfloat16
        and has_warpgroup_mma(x.device)
        and width % SIDE == x.shape[1] % SIDE == 0
        and len(experts) <= _MOST_ROWS
        and expert_warp_tuning(x.device, width, x.shape[1]).least_pairs
        <= experts.numel()
        <= _MOST_PAIRS
        and (gate is None or gate.kind in _GATES)
    )
