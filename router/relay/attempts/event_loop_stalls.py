"""Measures how long this process itself was stalled: its host was paused or overloaded, and what
peers sent meanwhile waits in its sockets, unread.

1. a task sleeps for `pause_s`, again and again
2. `record`: the process was stalled for what the task slept longer than that
3. `running_time`: a time without the stalls in it
"""

from __future__ import annotations

from bisect import bisect_right

_LATE_S = 0.05
"""An event loop that has work wakes its tasks that late."""
_KEPT_S = 600.0
"""Seconds for which a stall is remembered: as long as a silence may be. A whole answer may last
longer; older stalls count as its time."""


class EventLoopStalls:
    """Remembers stalls, in monotonic seconds. `pause_s`: how long the task sleeps each time."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._woke_at: float | None = None
        self._ends: list[float] = []
        self._lengths: list[float] = []
        self._totals: list[float] = []
        """Seconds of all stalls up to that one; all three lists are in the order of time."""

    def record(self, now: float) -> None:
        """Notes that the task woke up now."""
        slept_from, self._woke_at = self._woke_at, now
        late_s = 0.0 if slept_from is None else now - slept_from - self._pause_s
        if late_s <= _LATE_S:
            return
        total_s = self._totals[-1] if self._totals else 0.0
        self._ends.append(now)
        self._lengths.append(late_s)
        self._totals.append(total_s + late_s)
        num_old = bisect_right(self._ends, now - _KEPT_S)
        del self._ends[:num_old], self._lengths[:num_old], self._totals[:num_old]

    def running_time(self, since: float, now: float) -> float:
        """Returns the seconds between both in which this process ran."""
        first = bisect_right(self._ends, since)
        if first == len(self._ends):
            return now - since
        in_first_s = min(self._lengths[first], self._ends[first] - since)
        return now - since - in_first_s - (self._totals[-1] - self._totals[first])
