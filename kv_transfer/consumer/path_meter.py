"""Consumer: how fast KV comes from one peer, over all transfers at once.

    begun ───── computed ───────── received
      │            └─ the peer has all of it: what comes now comes as fast as the path gives
      └─ before, KV comes as it is computed: the path gives at least this much

Transfers share a path, so what counts is what came for all of them meanwhile. Before the first byte
connections and memory are opened, which says nothing of the path either. What came while the prompt
was computed bounds the rest from below: a pause of some milliseconds in the last layers is a pause,
not what the path gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_FEWEST_BYTES = 1 << 20
_LONG_S = 1.0
"""Fewer bytes say something about a rate only if they took so long that nothing else can be why.
That is no pause either."""
_LEAST_S = 1e-4
_TELLING_S = 0.02
"""A shorter time says how long a message takes, not what a path gives."""


class PathMoment(NamedTuple):
    """When this many bytes had come over the path."""

    num_bytes: int
    at: float


@dataclass(slots=True, weakref_slot=True)
class PathMeter:
    """Counts the bytes that came from one peer."""

    num_bytes: int = 0


def rate_between(
    begun: PathMoment | None, computed: PathMoment | None, received: PathMoment | None
) -> tuple[float, bool]:
    """Returns the path's bytes per second in the time of a transfer, and whether it gives no more;
    0 while it has not ended, and where that says nothing."""
    if begun is None or received is None:
        return 0.0, False
    if computed is None:
        return _rate(begun, received), False
    alone_since = max(begun, computed, key=lambda moment: moment.at)
    if received.at - alone_since.at >= _TELLING_S:
        rate = _rate(alone_since, received)
        is_pause = received.at - alone_since.at < _LONG_S
        if rate:
            return max(rate, _rate(begun, alone_since)) if is_pause else rate, True
    return _rate(begun, received), False


def _rate(since: PathMoment, until: PathMoment) -> float:
    num_bytes, seconds = until.num_bytes - since.num_bytes, until.at - since.at
    if num_bytes < _FEWEST_BYTES and (seconds < _LONG_S or not num_bytes):
        return 0.0
    return num_bytes / max(seconds, _LEAST_S)
