"""The shapes that `few_row_warps` can compute, and how."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_kernels.device import has_warpgroup_mma
from tandem_kernels.gemm.gemm_thresholds import gemm_thresholds
from tandem_kernels.tunings.table import plain_table

MOST_ROWS = 8
"""Columns of a product."""
_OUTPUTS_MULTIPLE, _INNER_MULTIPLE = 16, 32
_VECTOR = 8
"""Numbers that one instruction loads."""


@dataclass(frozen=True, slots=True)
class FewRowWarpTuning:
    """Says how one GEMM runs.

    Attributes:
        warps: Of a program, which share the inner dimension.
        ahead: Blocks of 32 inputs whose weights a warp has asked for before it multiplies.
        registers: Of a thread at most.
    """

    warps: int
    ahead: int
    registers: int


_TABLE = plain_table("few_row_warps", FewRowWarpTuning, ("num_outputs", "inner"))


def few_row_warp_tuning(device: torch.device, num_outputs: int, inner: int) -> FewRowWarpTuning:
    """Chooses for x [T, inner] -> [T, num_outputs]."""
    return _TABLE.choose(device, num_outputs, inner)


def takes_warps(x: Tensor, weight: Tensor) -> bool:
    """Returns whether the kernels take `x` [T, K] and `weight` [N, K]: bf16 on Hopper, more rows
    than are multiplied in registers and at most as many as a product has columns, whole blocks, and
    rows of both that begin where vectors may."""
    num_outputs, inner = weight.shape
    return (
        gemm_thresholds(x.device).register_rows < len(x) <= MOST_ROWS
        and x.dtype == weight.dtype == torch.bfloat16
        and has_warpgroup_mma(x.device)
        and num_outputs % _OUTPUTS_MULTIPLE == inner % _INNER_MULTIPLE == 0
        and x.stride(0) % _VECTOR == 0
        and x.stride(1) == 1
        and weight.is_contiguous()
        and x.storage_offset() % _VECTOR == weight.storage_offset() % _VECTOR == 0
    )
