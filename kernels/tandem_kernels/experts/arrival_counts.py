"""Counters of the programs that have written their part of a tile, for GEMMs of experts that are
split along the inner dimension."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

MAX_TILES = 1 << 14
"""Steps of more tiles have programs enough without parts of the inner dimension."""


@cache
def arrival_counts(device: torch.device) -> Tensor:
    """Returns a counter for each tile, zero between kernels. Kernels on one stream share them."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
