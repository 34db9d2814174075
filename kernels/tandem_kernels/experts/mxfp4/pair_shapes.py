"""The steps of few rows whose (token, expert) pairs are computed by themselves."""

from __future__ import annotations

from tandem_kernels.experts.arrival_counts import MAX_TILES
from tandem_kernels.experts.expert_tuning import ExpertShape, ExpertTuning, expert_tuning


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
