"""A second CUDA stream for work that needs not wait, and which nothing waits for until `join`.

    current   ─ x ─┬───── what is launched meanwhile ─────┬─ join ─
    side           └─ what is launched in `beside` ───────┘

Only while a graph is recorded: there it costs nothing, elsewhere the host has more to launch.
Memory that is taken on the side is given back there, and all of its users wait for each other at
the fork and at the join, so that none is written while it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

from tandem_kernels.stream_lanes import in_lane


def side_stream(device: torch.device, lane: int = 0) -> torch.cuda.Stream:
    """Returns one of a GPU: lanes do not wait for each other. The first call must come before a
    graph is recorded: the library of GEMMs takes memory of its own for each stream, which shall not
    belong to a graph."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _stream_of(index, lane)


@cache
def _stream_of(device: int, lane: int) -> torch.cuda.Stream:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        one = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        torch.mm(one, one)
    return stream


def is_recording(x: Tensor) -> bool:
    """Returns whether what is launched on the device of `x`, of any shape, goes into a graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class SideStream:
    """Forks where it is made, from all that was launched before."""

    def __init__(self, device: torch.device, lane: int = 0) -> None:
        self._lane = lane
        self._main = torch.cuda.current_stream(device)
        self._side = side_stream(device, lane)
        self._side.wait_stream(self._main)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Gives a context in which launches go to the side, and count apart from the main ones."""
        with torch.cuda.stream(self._side), in_lane(1 + self._lane):
            yield

    def follow(self) -> None:
        """Lets what is launched beside from now on wait for all that was launched before."""
        self._side.wait_stream(self._main)

    def join(self) -> None:
        """Lets what is launched from now on wait for the side."""
        self._main.wait_stream(self._side)


class NoSide:
    """Stands where there is no fork: all is launched in order."""

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def follow(self) -> None:
        """Has nothing to wait for."""

    def join(self) -> None:
        """Has nothing to wait for."""


NO_SIDE = NoSide()
"""Is what stands where nothing is launched beside."""


def fork(x: Tensor, most_rows: int, lane: int = 0) -> SideStream | NoSide:
    """Returns what to launch beside the work on `x` [T, ...]: on the side in recorded steps of up
    to `most_rows` tokens. Recorded or not, the same kernels are launched, since a graph cannot
    record what is not loaded yet."""
    return SideStream(x.device, lane) if len(x) <= most_rows and is_recording(x) else NO_SIDE
