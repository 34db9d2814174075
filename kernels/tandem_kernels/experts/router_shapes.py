"""The rows whose router norms them, and leaves the choice of experts to these (`normed_router`)."""

from __future__ import annotations

from torch import Tensor

from tandem_kernels.gemm import few_row_shapes
from tandem_kernels.gemm.gemm_thresholds import gemm_thresholds

_MAX_HIDDEN, _MAX_HIDDEN_OF_MANY = 8192, 4096
"""A program of the router holds whole rows in registers: up to `FEW` rows, and more."""
FEW = 4


def takes_router(x: Tensor, weight: Tensor) -> bool:
    """Returns whether rows `x` [T, H] are normed by a router of `weight` [E, H], and may be left to
    experts that choose themselves."""
    return len(x) <= gemm_thresholds(x.device).routed_rows and norms_rows(x, weight)


def norms_rows(x: Tensor, weight: Tensor) -> bool:
    """Returns whether `normed_router` takes rows `x` [T, H] and a router's `weight` [E, H]."""
    return (
        len(x) <= gemm_thresholds(x.device).normed_rows
        and few_row_shapes.takes(x, weight)
        and x.is_contiguous()
        and x.shape[1] <= (_MAX_HIDDEN if len(x) <= FEW else _MAX_HIDDEN_OF_MANY)
    )
