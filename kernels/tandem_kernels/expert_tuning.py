"""How the GEMMs of experts run best, by how many rows an expert has; found by measurement
(`python -m bench.engine.experts`)."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SEARCHED_PAIRS = 256
"""Up to so many (token, expert) pairs each program finds its own rows; beyond, they are sorted
first, by one more launch."""


@dataclass(frozen=True, slots=True)
class ExpertTuning:
    """Says how one shape runs.

    Attributes:
        rows, cols, depth: Of a tile: pairs, outputs, and how much of the inner dimension at once.
        group: So many row tiles in a row share their weights' tiles in the cache.
    """

    rows: int
    cols: int
    depth: int
    num_warps: int
    num_stages: int
    group: int = 1


FIXED = ExpertTuning(rows=64, cols=64, depth=64, num_warps=4, num_stages=3)
"""One choice for all batches, where a row must have the same bits in any company."""


def expert_tuning(num_pairs: int, num_experts: int, itemsize: int, *, gated: bool) -> ExpertTuning:
    """Chooses by the mean number of rows that an expert has, `num_pairs / num_experts`.

    Args:
        itemsize: Bytes of a number.
        gated: The first GEMM, which computes two outputs for each column.
    """
    if itemsize > 2:
        return ExpertTuning(rows=16, cols=32, depth=32, num_warps=4, num_stages=2)
    rows = num_pairs / num_experts
    if rows <= 8:
        return ExpertTuning(16, 32 if gated else 64, 128, num_warps=4, num_stages=3)
    if rows <= 32:
        return ExpertTuning(32, 64 if gated else 128, 128, num_warps=4, num_stages=3)
    if rows <= 64:
        return ExpertTuning(64, 64, 64, num_warps=4, num_stages=4, group=4)
    return ExpertTuning(128, 128 if gated else 256, 64, num_warps=8, num_stages=4, group=8)
