"""Follows how a rank loads its weights, for the log.

1. `start` with the bytes that are to be read
2. `report` as they are: a line every ten seconds, so that a short load has none
3. `finish` says how long it took, and what of the checkpoint was left aside
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engine.models.loader import SkippedTensors

logger = logging.getLogger(__name__)

_LINE_EVERY_S = 10.0
_GIB = 1 << 30


class LoadLog:
    """Passes fractions on to `report`.

    Args:
        clock: Seconds, for tests.

    Attributes:
        total_bytes: What the rank reads; 0 until it is known, and for dummy weights.
    """

    def __init__(
        self, report: Callable[[float], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total_bytes = 0
        self._report = report
        self._clock = clock
        self._started_at = self._logged_at = clock()

    def start(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes

    def report(self, fraction: float) -> None:
        self._report(fraction)
        now = self._clock()
        if self.total_bytes and now - self._logged_at >= _LINE_EVERY_S:
            self._logged_at = now
            logger.info(
                "loading weights: %.1f of %.1f GiB in %.0f s",
                fraction * self.total_bytes / _GIB,
                self.total_bytes / _GIB,
                now - self._started_at,
            )

    def finish(self, skipped: SkippedTensors, *, tells_skipped: bool) -> None:
        """Logs the whole load. `tells_skipped`: on one rank, for they all skip alike."""
        if not self.total_bytes:
            return
        seconds = self._clock() - self._started_at
        logger.info(
            "loaded weights: %.2f GiB in %.1f s, %.2f GiB/s",
            self.total_bytes / _GIB,
            seconds,
            self.total_bytes / _GIB / max(seconds, 1e-6),
        )
        if skipped.names and tells_skipped:
            logger.info("the checkpoint has what is not read: %s", skipped)
