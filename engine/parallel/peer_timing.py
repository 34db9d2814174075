"""Measurements at the start by which ranks choose, all alike, between memory that they share and a
library."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_CALLS = 20
"""Calls that a graph of a measurement holds."""
_REPLAYS = 5

AllReduce = Callable[[Tensor], Tensor]
"""Sums over ranks by a library."""


def microseconds_in_graph(way: Callable[..., object], *given: Tensor) -> float:
    """Returns how long a call takes inside a graph: the median over replays."""
    device = given[0].device
    for _ in range(3):
        way(*given)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            way(*given)
    event: Any = torch.cuda.Event
    marks = [event(enable_timing=True) for _ in range(_REPLAYS + 1)]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize(device)
    spans = (one.elapsed_time(other) for one, other in itertools.pairwise(marks))
    return float(statistics.median(spans)) * 1000 / _CALLS


def mean_over_ranks(
    all_reduce: AllReduce, ranks: int, device: torch.device, *own: float
) -> list[float]:
    """Returns the means over ranks: what one rank decides by, all must."""
    total = all_reduce(torch.tensor(own, dtype=torch.float32, device=device))
    found: list[float] = (total / ranks).tolist()
    return found


def count_over_ranks(all_reduce: AllReduce, own: Tensor) -> int:
    """Returns the sum over ranks of `own`, one number."""
    return int(all_reduce(own.float().view(1)).item())
