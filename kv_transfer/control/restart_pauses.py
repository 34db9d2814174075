"""Says how long a transfer process waits before it starts again, because its former lives were
short.

    1. `begin`        a life begins
    2. `next_s`       it has ended: seconds in which the next one sleeps before it does anything
"""

from __future__ import annotations

import time
from collections.abc import Callable

_STABLE_S = 10.0
"""A process that has worked for this long may start again at once."""
_FIRST_S = 0.5
_LONGEST_S = 30.0


class RestartPauses:
    """Pauses of one process: none, then 0.5 s, and twice as long behind each further life that was
    short, up to 30 s. The pause itself is no part of a life."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._works_from = 0.0
        self._pause_s = 0.0
        self._num_short = 0

    def begin(self) -> None:
        """Notes that the process was started, and sleeps first for what `next_s` has said."""
        self._works_from = self._clock() + self._pause_s

    def next_s(self) -> float:
        """Returns the seconds to sleep, of a process whose life has just ended."""
        if self._clock() - self._works_from >= _STABLE_S:
            self._num_short = 0
        self._num_short += 1
        if self._num_short == 1:
            self._pause_s = 0.0
        else:
            self._pause_s = min(_LONGEST_S, max(_FIRST_S, 2 * self._pause_s))
        return self._pause_s
