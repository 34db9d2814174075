"""The shapes that the kernel of `lora_gemm` can compute."""

from __future__ import annotations

from torch import Tensor

from tandem_kernels.gemm import small_m_shapes

_MOST_COLUMNS = 1024
"""A of all slots has this many at most: with more, the first programs take longer than the
others."""

_COUNTERS, _LEAST_COLS = 3, 32


def num_counters(num_outputs: int) -> int:
    """Returns how many counters the kernel needs for a layer: a few, and one for each tile."""
    return _COUNTERS + num_outputs // _LEAST_COLS


def takes(x: Tensor, weight: Tensor, a: Tensor, ends: tuple[int, ...]) -> bool:
    """Returns whether the kernel takes `x` [T, K], `weight` [N, K] and `a` [slots, P * r, K]: what
    `small_m_gemm` does, where no tile belongs to two projections.
    """
    return (
        a.shape[0] * a.shape[1] <= _MOST_COLUMNS
        and all(end % small_m_shapes.OUTPUTS_MULTIPLE == 0 for end in ends)
        and small_m_shapes.takes(x, weight)
    )
