"""Counters of the programs that have written their part of a tile, for GEMMs of experts that are
split along the inner dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.stream_lanes import lane_counters

MAX_TILES = 1 << 14
"""Steps of more tiles have programs enough without parts of the inner dimension."""


def arrival_counts(device: torch.device) -> Tensor:
    """Returns a counter for each tile, zero between kernels of a lane."""
    return lane_counters("experts", MAX_TILES, device)
