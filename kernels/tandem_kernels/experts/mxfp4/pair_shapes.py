"""The steps of few rows whose (token, expert) pairs are computed by themselves."""

from __future__ import annotations

from tandem_kernels.experts.arrival_counts import MAX_TILES
from tandem_kernels.experts.expert_tuning import ExpertShape, ExpertTuning, expert_tuning

FORMAT = "mxfp4"


def takes_each_pair(tuning: ExpertTuning, num_pairs: int, num_outputs: int) -> bool:
    """Returns whether a GEMM runs as this tuning asks: there are counters for so many tiles."""
    return tuning.each_pair and num_pairs * -(-num_outputs // tuning.cols) <= MAX_TILES


def mxfp4_pair_tunings(
    shape: ExpertShape, num_pairs: int, gpu: str
) -> tuple[ExpertTuning, ExpertTuning] | None:
    """Returns the tunings of both GEMMs, if both compute each pair by itself; else None."""
    first = expert_tuning(shape, num_pairs, gpu, gated=True)
    if not takes_each_pair(first, num_pairs, shape.width) or not sums_itself(shape, num_pairs, gpu):
        return None
    return first, expert_tuning(shape, num_pairs, gpu, gated=False)


def sums_itself(shape: ExpertShape, num_pairs: int, gpu: str) -> bool:
    """Returns whether the second GEMM computes each pair by itself, and sums a token's."""
    tuning = expert_tuning(shape, num_pairs, gpu, gated=False)
    return takes_each_pair(tuning, num_pairs, shape.hidden)
