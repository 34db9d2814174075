"""How much a connection commits to its order of sending: what the path takes in some milliseconds.

    the socket took all, or the kernel   twice as much as before, at most `MAX_AHEAD`
    had nothing left when it had room
    the socket was full                  some milliseconds of what it took since it was last full

What is cut into frames, or lies unsent in the kernel, goes out before anything that comes later,
however short that is. On a slow path megabytes of it are seconds.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_AHEAD = 2 << 20
_LEAST_AHEAD = 16 << 10
_FIRST_AHEAD = 256 << 10
_AHEAD_S = 0.02
_UNSENT = 2
"""This many times as much may lie unsent in the kernel, which sends while we do other things."""


class SendPace:
    """Watches one socket. `limit_unsent(bytes)` bounds what the kernel holds unsent; 0: as it
    likes."""

    def __init__(self, limit_unsent: Callable[[int], None]) -> None:
        self.ahead = _FIRST_AHEAD
        """Bytes to cut into frames before they can be sent."""
        self._limit_unsent = limit_unsent
        self._unsent = 0
        self._full_at: float | None = None
        self._taken = 0

    @property
    def is_bounded(self) -> bool:
        """Returns whether frames should be short, too."""
        return self.ahead < MAX_AHEAD

    def sent(self, num_bytes: int, now: float, *, is_full: bool, has_more: bool) -> None:
        """Learns that the socket took this many bytes, whether it would take no more, and whether
        there is more to send."""
        self._taken += num_bytes
        if is_full:
            self._was_full(now)
        else:
            self.ahead = min(2 * self.ahead, MAX_AHEAD)
            if not has_more:
                self._full_at = None
        self._bound_kernel()

    def ran_dry(self) -> None:
        """The kernel had nothing to send: it was we who held the path up."""
        self.ahead = min(2 * self.ahead, MAX_AHEAD)
        self._full_at = None
        self._bound_kernel()

    def _was_full(self, now: float) -> None:
        if self._full_at is not None and now > self._full_at:
            rate = self._taken / (now - self._full_at)
            self.ahead = int(min(max(rate * _AHEAD_S, _LEAST_AHEAD), MAX_AHEAD))
        self._full_at, self._taken = now, 0

    def _bound_kernel(self) -> None:
        unsent = _UNSENT * self.ahead if self.is_bounded else 0
        if not unsent / 2 <= self._unsent <= unsent * 2:
            self._unsent = unsent
            self._limit_unsent(unsent)
