"""Times a kernel over the tiles that it may take, and shows the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from triton.runtime.errors import OutOfResources

from bench.engine.timing.device_time import graph_us

Tuning = TypeVar("Tuning")
_SHOWN = 6


def compare_tiles(
    tunings: Iterable[Tuning],
    calls_of: Callable[[Tuning], Sequence[Callable[[], object]]],
    replays: int = 15,
) -> dict[str, object]:
    """Prints the fastest tunings, in microseconds a call, and the first one, which is the one that
    is taken and has a star. Returns the times of that and of the fastest.

    Args:
        calls_of: Returns the calls of a tuning that are timed in one graph.
    """
    timed = []
    for tuning in dict.fromkeys(tunings):
        try:
            us = graph_us(calls_of(tuning), replays=replays)
        except OutOfResources:
            us = math.inf
        timed.append((us, tuning))
    taken = timed[0]
    fastest = sorted(timed, key=lambda item: item[0])[:_SHOWN]
    for us, tuning in fastest if taken in fastest else [*fastest, taken]:
        print(f"    {us:6.1f} {'*' if tuning == taken[1] else ' '} {tuning}", flush=True)
    return {"taken_us": taken[0], "best_us": fastest[0][0], "best": repr(fastest[0][1])}
