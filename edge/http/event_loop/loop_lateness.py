"""Measures how late an event loop takes what comes: the part of a token's way that a busy process
adds to it.

1. made     counts nothing yet, so its series are there from the beginning
2. `watch`  a timer of the kernel's ticks; the loop reads it as it reads a connection, and each tick
            counts by the time from when it was due to when the loop came to it
3. `collect`, at each scrape

Ticks are due at fixed times, whatever the loop does: one that was busy for a while comes to several
at once, and each of them has waited as long as a token that came at that moment would have. That
the host gave the process no time counts as well.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from edge.http.event_loop.kernel_timer import KernelTimer

TICK_S = 0.01
BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5,
)  # fmt: skip
NAME = "tandem_event_loop_lateness_seconds"

_MOST_AT_ONCE = 1000
"""Ticks that are counted one by one; of more, the first are beyond all bounds."""


class LoopLateness(Collector):
    """Counts ticks by their lateness, in the buckets of `BOUNDS_S`; the last one has no bound."""

    def __init__(self, tick_s: float = TICK_S) -> None:
        self._tick_s = tick_s
        self._due_at = 0.0
        """CLOCK_MONOTONIC seconds of the last tick that was read."""
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Counts ticks of the running loop. Raises OSError where no descriptor is left."""
        loop = asyncio.get_running_loop()
        timer = KernelTimer()
        self._due_at = time.monotonic()
        timer.set(self._due_at + self._tick_s, self._tick_s)
        loop.add_reader(timer.fileno(), self._read, timer)
        try:
            yield
        finally:
            loop.remove_reader(timer.fileno())
            timer.close()

    def _read(self, timer: KernelTimer) -> None:
        if count := timer.read():
            self._due_at += count * self._tick_s
            self.took(count, time.monotonic() - self._due_at)

    def took(self, count: int, late_s: float) -> None:
        """Counts ticks that were read at once, the last of them late by `late_s`."""
        for _ in range(min(count, _MOST_AT_ONCE)):
            self.counts[bisect_left(BOUNDS_S, late_s)] += 1
            self.total_s += late_s
            late_s += self._tick_s
        self.counts[-1] += max(0, count - _MOST_AT_ONCE)

    def cumulative(self) -> dict[str, float]:
        """Maps the bounds of buckets, as Prometheus writes them, to the ticks up to there."""
        uppers = [*map(str, BOUNDS_S), "+Inf"]
        return dict(zip(uppers, map(float, accumulate(self.counts)), strict=True))

    def collect(self) -> Iterator[Metric]:
        text = "How late the event loop of this process took what was there for it."
        family = HistogramMetricFamily(NAME, text)
        family.add_metric([], list(self.cumulative().items()), self.total_s)
        yield family
