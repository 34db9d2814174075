"""Measures how fast the line goes on, and says when there will be room in it.

1. unknown    no slot has come free yet while something waited. A slot counts as free again
              after a second, or after as long as all of them have been taken
2. measured   the time between two slots that come free, smoothed
3. overdue    no slot comes free for longer than that: the wait counts as it is
4. sure       the pace over two periods of 2 s and 8 slots at least, of which the faster one
              counts: slots come free by whole batches, and a node may stand still for a moment.
              By this, requests are refused that have a place in the line

A client that is refused because the line is full gets the time when a place in it comes free which
none was given before: refused clients come back one after the other, as fast as the line goes
on.
"""

from __future__ import annotations

from dataclasses import dataclass

_SMOOTHING = 0.05
_PERIOD_S = 2.0
_PERIOD_SLOTS = 8
_GUESS_S = 1.0
"""Time from a slot's beginning to its first byte, until one was seen."""


@dataclass(slots=True)
class LinePace:
    """Holds what is known of the pace. All times are monotonic seconds."""

    _smoothed_s: float = 0.0
    _weight: float = 0.0
    """The weight of measurements in `_smoothed_s`: the rest is the zero that it began with."""
    _since: float = 0.0
    """The time at which the last slot came free, or the first one began to wait for it."""
    _promised_until: float = 0.0
    _period_since: float = 0.0
    """The time at which a slot came free, and the period began; 0: none has, since the line did."""
    _num_freed: int = 0
    """Slots that came free after it."""
    _period_interval_s: float = 0.0
    """The mean of the last period; 0: there was none yet."""
    sure_interval_s: float = 0.0
    """Time between two slots that come free, at most; 0: nothing is sure yet."""

    def line_begins(self, now: float) -> None:
        """Records that something waits, after nothing did."""
        self._since = now
        self._period_since = self._period_interval_s = self.sure_interval_s = 0.0

    def slot_freed(self, now: float, *, is_waited_for: bool) -> bool:
        """Returns whether `sure_interval_s` was measured anew."""
        if is_waited_for and self._since:
            self._smoothed_s += _SMOOTHING * (now - self._since - self._smoothed_s)
            self._weight += _SMOOTHING * (1 - self._weight)
        self._since = now
        return is_waited_for and self._period_ends(now)

    def _period_ends(self, now: float) -> bool:
        if not self._period_since:
            self._period_since, self._num_freed = now, 0
            return False
        self._num_freed += 1
        period_s = now - self._period_since
        if period_s < _PERIOD_S or self._num_freed < _PERIOD_SLOTS:
            return False
        interval_s = period_s / self._num_freed
        if self._period_interval_s:
            self.sure_interval_s = min(interval_s, self._period_interval_s)
        self._period_since, self._num_freed, self._period_interval_s = now, 0, interval_s
        return self.sure_interval_s > 0

    def surely_drains_in_s(self, num_waiting: int) -> float:
        """Returns the time until this many have gone on, at most as long as was measured: who is
        refused by it would really have come too late."""
        return num_waiting * self._smoothed_s

    def drains_in_s(self, num_waiting: int, now: float, num_slots: int) -> float:
        """Returns the best guess of the same."""
        return num_waiting * self._interval_s(now, num_slots)

    def next_place_in_s(self, now: float, num_slots: int) -> float:
        """Returns the time until a place comes free, another one at each call."""
        interval_s = self._interval_s(now, num_slots)
        self._promised_until = max(now, self._promised_until) + interval_s
        return self._promised_until - now

    def _interval_s(self, now: float, num_slots: int) -> float:
        waited_s = max(0.0, now - self._since)
        if not self._weight:
            return max(_GUESS_S, waited_s) / num_slots
        measured_s = self._smoothed_s / self._weight
        return measured_s + _SMOOTHING * max(0.0, waited_s - measured_s)
