"""How the decode attention kernel runs best, by shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Says how one shape runs best; found by measurement inside whole decode steps. Alone, back to
    back, fewer and larger programs look as good; behind a GEMM they start later.
    """

    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


def decode_tuning(num_units: int, head_dim: int, dtype: torch.dtype) -> DecodeTuning:
    """Chooses by `num_units`: requests times KV heads, which cost the same when contexts
    are alike.
    """
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    if dtype.itemsize == 1:
        return _fp8_decode_tuning(num_units, row_bytes)
    if row_bytes > 512:
        return DecodeTuning(tile=16, num_warps=4, num_stages=3, programs_per_sm=2)
    if row_bytes > 256:
        return DecodeTuning(tile=32, num_warps=4, num_stages=5, programs_per_sm=2)
    if row_bytes <= 128 and num_units <= 512:
        return _narrow_decode_tuning(num_units)
    if num_units <= 16:
        # One program on an SM waits for its products: a layer of Llama-3.1-8B takes 170 / 298 us
        # behind 32k / 128k tokens by one, 161 / 252 by two, and behind 1k 128 by either (one H200).
        return DecodeTuning(tile=64, num_warps=4, num_stages=5, programs_per_sm=2)
    if num_units <= 128:
        return DecodeTuning(tile=64, num_warps=4, num_stages=3, programs_per_sm=3)
    if num_units <= 256:
        return DecodeTuning(tile=128, num_warps=4, num_stages=3, programs_per_sm=2)
    return DecodeTuning(tile=64, num_warps=2, num_stages=3, programs_per_sm=4)


def _narrow_decode_tuning(num_units: int) -> DecodeTuning:
    """Keeps as many bytes in flight for short rows, by more stages: of 3 or 4 only one has its
    data on the way, since tiles wait for the numbers of their blocks. Behind 32k tokens a layer of
    gpt-oss takes 25.7 / 130 / 481 us of 1 / 8 / 32 rows on an H200 (27.6 / 150 / 521 by 3 or 4),
    behind 128k one row takes 70 (85), and behind 4k 64 rows take 135 (148)."""
    if num_units <= 128:
        return DecodeTuning(tile=64, num_warps=4, num_stages=5, programs_per_sm=3)
    return DecodeTuning(tile=128, num_warps=4, num_stages=5, programs_per_sm=2)


def _fp8_decode_tuning(num_units: int, row_bytes: int) -> DecodeTuning:
    """Keeps as many bytes in flight as the choices for 16-bit caches do, by more stages: larger
    tiles would take more registers than there are."""
    if row_bytes > 256:
        return DecodeTuning(tile=16, num_warps=4, num_stages=5, programs_per_sm=2)
    if row_bytes > 128:
        return DecodeTuning(tile=32, num_warps=4, num_stages=7, programs_per_sm=2)
    if num_units <= 16:
        return DecodeTuning(tile=64, num_warps=4, num_stages=7, programs_per_sm=1)
    if num_units <= 128:
        return DecodeTuning(tile=64, num_warps=4, num_stages=5, programs_per_sm=3)
    if num_units <= 256:
        return DecodeTuning(tile=128, num_warps=4, num_stages=5, programs_per_sm=2)
    return DecodeTuning(tile=64, num_warps=2, num_stages=5, programs_per_sm=4)
