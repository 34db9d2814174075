"""The steps of few rows whose (token, expert) pairs are computed by themselves, and those whose
routers leave the choice of experts to them."""

from __future__ import annotations

from torch import Tensor

from tandem_kernels.experts.arrival_counts import MAX_TILES
from tandem_kernels.experts.expert_tuning import ExpertShape, ExpertTuning, expert_tuning
from tandem_kernels.gemm import few_row_shapes

MAX_ROUTED_ROWS = 4
"""A router of more rows multiplies on matrix units, and so many programs would look for the same
experts that a launch costs less."""
_MAX_HIDDEN = 8192
"""A program of the router holds whole rows in registers."""


def takes_each_pair(tuning: ExpertTuning, num_pairs: int, num_outputs: int) -> bool:
    """Returns whether a GEMM runs as this tuning asks: there are counters for so many tiles."""
    return tuning.each_pair and num_pairs * -(-num_outputs // tuning.cols) <= MAX_TILES


def mxfp4_pair_tunings(
    num_experts: int, width: int, hidden: int, num_pairs: int, gpu: str
) -> tuple[ExpertTuning, ExpertTuning] | None:
    """Returns the tunings of both GEMMs, if both compute each pair by itself; else None."""
    shape = ExpertShape(num_experts, width, hidden, "mxfp4")
    first, second = (expert_tuning(shape, num_pairs, gpu, gated=gated) for gated in (True, False))
    by_pair = takes_each_pair(first, num_pairs, width) and takes_each_pair(
        second, num_pairs, hidden
    )
    return (first, second) if by_pair else None


def sums_itself(num_experts: int, width: int, hidden: int, num_pairs: int, gpu: str) -> bool:
    """Returns whether the second MXFP4 GEMM computes each pair by itself, and sums a token's."""
    shape = ExpertShape(num_experts, width, hidden, "mxfp4")
    tuning = expert_tuning(shape, num_pairs, gpu, gated=False)
    return takes_each_pair(tuning, num_pairs, hidden)


def takes_router(x: Tensor, weight: Tensor) -> bool:
    """Returns whether `normed_router` takes rows `x` [T, H] and a router's `weight` [E, H]."""
    return (
        len(x) <= MAX_ROUTED_ROWS
        and few_row_shapes.takes(x, weight)
        and x.is_contiguous()
        and x.shape[1] <= _MAX_HIDDEN
    )
