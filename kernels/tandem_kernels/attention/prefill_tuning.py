"""Says how attention of long queries runs best, by shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

LONG_CONTEXT = 4096
"""The number of tokens from which larger tiles are faster: by 4 % of a step of 4 x 2048 tokens
behind 8192 each. Below smaller ones are, by 0.7 % of a step of 4 x 2048.
"""
_FEW_ROWS = 128 * 128
_SMALL_WINDOW = 256
"""Positions. Through 128 of them, 2048 tokens are attended in 33 us instead of 42."""


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Says how one shape runs best; found by measurement.

    Attributes:
        in_parts: Contexts may be cut into parts, because tiles may be too few for the device.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    in_parts: bool = False


def prefill_tuning(
    max_rows: int,
    total_rows: int,
    max_context: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
    window: int | None = None,
    *,
    by_warpgroups: bool = False,
) -> PrefillTuning:
    """Choose by rows, which are query tokens times the query heads of a KV head.

    `max_rows` are those of the longest request, `total_rows` those of all requests and KV heads.
    `max_context`: tokens of the longest context, as far as a window shows them. `by_warpgroups`:
    four warps multiply together, and there is room for 192 KiB: on Hopper, of a cache in the
    queries' type.
    """
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    is_few = total_rows <= _FEW_ROWS
    is_narrow = window is not None and window <= _SMALL_WINDOW
    if row_bytes > 512:
        if by_warpgroups and dtype.itemsize == 2 and max_rows > 16:
            return PrefillTuning(rows=64, tile=64, num_warps=8, num_stages=1)
        return PrefillTuning(rows=16 if max_rows <= 16 else 32, tile=16, num_warps=4, num_stages=2)
    if max_rows <= 16:
        return PrefillTuning(rows=16, tile=32, num_warps=4, num_stages=3, in_parts=True)
    if row_bytes > 256:
        if by_warpgroups and dtype.itemsize == 2 and not is_few and not is_narrow:
            return PrefillTuning(rows=128, tile=64, num_warps=8, num_stages=2)
        return PrefillTuning(rows=64, tile=32, num_warps=4, num_stages=2, in_parts=is_few)
    if max_rows <= 64 or is_few:
        return PrefillTuning(rows=64, tile=64, num_warps=4, num_stages=4, in_parts=True)
    if row_bytes <= 128 and is_narrow:
        return PrefillTuning(rows=64, tile=32, num_warps=4, num_stages=2)
    if row_bytes <= 128 and max_context < LONG_CONTEXT:
        return PrefillTuning(rows=64, tile=64, num_warps=4, num_stages=4)
    if max_context >= LONG_CONTEXT and block_size % 128 == 0:
        return PrefillTuning(rows=128, tile=128, num_warps=8, num_stages=5)
    if max_context >= LONG_CONTEXT and block_size % 64 == 0:
        return PrefillTuning(rows=128, tile=64, num_warps=8, num_stages=5)
    return PrefillTuning(rows=128, tile=64, num_warps=4, num_stages=4)


def fixed_tuning(head_dim: int, dtype: torch.dtype) -> PrefillTuning:
    """Returns the same tuning for all shapes of a batch."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    if row_bytes > 512:
        return PrefillTuning(rows=16, tile=16, num_warps=4, num_stages=2)
    if row_bytes > 256:
        return PrefillTuning(rows=64, tile=32, num_warps=4, num_stages=2)
    return PrefillTuning(rows=64, tile=64, num_warps=4, num_stages=4)
