"""Numbers the streams whose kernels may run at the same time.

Programs that share an output count who has ended, in counters that are zero between kernels. Two
such kernels at once would count each other's programs: so each lane has counters of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor

LANES = 3
"""The main stream is lane 0."""
_lane: ContextVar[int] = ContextVar("lane", default=0)


@contextmanager
def in_lane(lane: int) -> Iterator[None]:
    """Says that what is launched in the context may run beside what other lanes launch."""
    before = _lane.set(lane)
    try:
        yield
    finally:
        _lane.reset(before)


def lane_counters(kernels: str, count: int, device: torch.device) -> Tensor:
    """Returns `count` counters of the lane that launches now, which `kernels` share, zero between
    any two of them. All lanes' are made at the first call, which must not be while a graph is
    recorded: they would live with the graph."""
    return _of_all_lanes(kernels, count, device)[_lane.get()]


@cache
def _of_all_lanes(kernels: str, count: int, device: torch.device) -> Tensor:
    """`kernels` is a part of the key: others of as many counters have their own."""
    return torch.zeros((LANES, count), dtype=torch.int32, device=device)
