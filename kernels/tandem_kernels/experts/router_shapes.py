"""The rows whose router norms them, and leaves the choice of experts to these (`normed_router`)."""

from __future__ import annotations

from torch import Tensor

from tandem_kernels.gemm import few_row_shapes
from tandem_kernels.gemm.gemm_thresholds import gemm_thresholds

_MAX_HIDDEN = 8192
"""A program of the router holds whole rows in registers."""


def takes_router(x: Tensor, weight: Tensor) -> bool:
    """Returns whether `normed_router` takes rows `x` [T, H] and a router's `weight` [E, H]."""
    return (
        len(x) <= gemm_thresholds(x.device).routed_rows
        and few_row_shapes.takes(x, weight)
        and x.is_contiguous()
        and x.shape[1] <= _MAX_HIDDEN
    )
