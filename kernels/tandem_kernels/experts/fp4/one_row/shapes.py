"""Says for which steps the experts of one token are multiplied a warp at a time, and how."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_kernels.device import has_warpgroup_mma
from tandem_kernels.elementwise.gate_form import GateForm
from tandem_kernels.gemm.fp4_tiles import SIDE, TILE_WORDS
from tandem_kernels.tunings.table import plain_table

_GATES = ("silu", "clamped", "limited", "capped")
_MOST_EXPERTS = 256
"""Each warp holds the logits of all."""


@dataclass(frozen=True, slots=True)
class OneRowTuning:
    """Says how both GEMMs run.

    Attributes:
        warps, down_warps: Of a program; of the second GEMM, those of one expert.
        ahead, down_ahead: Turns whose weights a warp has asked for before it multiplies.
        registers, down_registers: Of a thread at most.
    """

    warps: int
    ahead: int
    registers: int
    down_warps: int
    down_ahead: int
    down_registers: int


_TABLE = plain_table("fp4_one_row", OneRowTuning, ("width", "hidden"))


def one_row_tuning(device: torch.device, width: int, hidden: int) -> OneRowTuning:
    """Chooses for experts [hidden] -> [width] -> [hidden]."""
    return _TABLE.choose(device, width, hidden)


def takes_one_row(
    x: Tensor, w13: Tensor, width: int, top_k: int, gate: GateForm | None = None
) -> bool:
    """Returns whether `fp4_one_row_experts` computes this: one token in bf16 on Hopper, weights in
    MXFP4 whose tiles are full, and as many experts of a token as warps can share."""
    return (
        len(x) == 1
        and x.dtype == torch.bfloat16
        and has_warpgroup_mma(x.device)
        and w13.shape[-1] == TILE_WORDS
        and len(w13) <= _MOST_EXPERTS
        and width % SIDE == x.shape[1] % SIDE == 0
        and top_k in (1, 2, 4)
        and (gate is None or gate.kind in _GATES)
    )
