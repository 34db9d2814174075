"""The steps of few rows whose (token, expert) pairs are computed by themselves, or by programs that
share all tiles out evenly."""

from __future__ import annotations

from torch import Tensor

from tandem_kernels.experts.arrival_counts import MAX_TILES
from tandem_kernels.experts.expert_tuning import ExpertShape, ExpertTuning, gemm_tunings
from tandem_kernels.gemm.fp4_tiles import NVFP4_TILE_WORDS, TILE_WORDS

_FORMATS = {TILE_WORDS: "mxfp4", NVFP4_TILE_WORDS: "nvfp4"}


def format_of(tiles: Tensor) -> str:
    """Returns the name of the format of tiles, as tables of tilings have it."""
    return _FORMATS[tiles.shape[-1]]


def takes_each_pair(tuning: ExpertTuning, num_pairs: int, num_outputs: int) -> bool:
    """Returns whether a GEMM runs as this tuning asks: there are counters for this many tiles."""
    return tuning.each_pair and num_pairs * -(-num_outputs // tuning.cols) <= MAX_TILES


def takes_even_runs(
    tuning: ExpertTuning, num_tokens: int, num_pairs: int, num_outputs: int
) -> bool:
    """Returns whether a GEMM runs as this tuning asks: an expert has at most its rows, since no
    token goes to one twice, and there are counters for this many tiles."""
    tiles = num_pairs * -(-num_outputs // tuning.cols)
    return tuning.runs > 0 and num_tokens <= tuning.rows and tiles <= MAX_TILES


def fp4_pair_tunings(
    shape: ExpertShape, num_pairs: int, gpu: str
) -> tuple[ExpertTuning, ExpertTuning] | None:
    """Returns the tunings of both GEMMs, if both compute each pair by itself; else None."""
    first, second = gemm_tunings(shape, num_pairs, gpu)
    if takes_each_pair(first, num_pairs, shape.width) and sums_itself(shape, num_pairs, gpu):
        return first, second
    return None


def sums_itself(shape: ExpertShape, num_pairs: int, gpu: str) -> bool:
    """Returns whether the second GEMM computes each pair by itself, and sums a token's."""
    _, second = gemm_tunings(shape, num_pairs, gpu)
    return takes_each_pair(second, num_pairs, shape.hidden)
