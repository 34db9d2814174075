"""Measures the paths on which KV comes here, one for each prefill node, and avoids bad ones.

    open ──── KV was late, stalled, damaged or lost ───▶ avoided ── time over ──▶ tried
     ▲                                                     ▲                       │ by one request
     │                                                     └─ twice as long ── fails again
     └──────────────────────────── KV arrives ─────────────────────────────────────┘

rate     bytes per second, as pulls of real requests measured it: of one that waited for the path
         alone what the path gives, of others what it gives at least, which says nothing against
         it. Its age makes it larger, by two every ten seconds: a path that looked slow is tried
         again, first where little is lost, and by one request at a time
backlog  bytes of pulls that have begun and not ended, less what came since at that rate

One of them is kept for each of the nodes used last, and forgotten an hour after its last pull.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kv_transfer.errors import KV_DAMAGED, KV_LOST, KV_STALLED
from kv_transfer.metadata import TransferStats
from tandem_pb import node_pb2

KV_AVOIDED = "kv_avoided"
"""KV from that node did not arrive a moment ago."""
KV_SLOW = "kv_slow"
"""The prompt is sooner computed here than its KV comes from that node."""
KV_LATE = "kv_late"
"""KV did not come in the time in which the prompt would have been computed here, and half of it."""
OF_A_PATH = frozenset((KV_LATE, KV_STALLED, KV_DAMAGED, KV_LOST))
"""Failures for which a path is avoided."""
_FIRST_S = 1.0
_LONGEST_S = 60.0
_DOUBLES_S = 10.0
_MOST_DOUBLINGS = 64
_TRY_S = 10.0
"""Bounds the time in which one request alone tries a path that looked slow, if none measures."""
_FORGOTTEN_S = 3600.0
_MAX_PATHS = 256
_NEW = 0.5
"""Weight of a new rate against those before it."""


@dataclass(slots=True)
class _Pull:
    num_bytes: int
    began_at: float


@dataclass(slots=True)
class KVPath:
    """One path. Times: seconds of the clock."""

    rate: float = 0.0
    """Bytes per second when they were measured; 0: never."""
    is_limit: bool = False
    """The path gave no more; else it gives this much at least."""
    measured_at: float = 0.0
    used_at: float = 0.0
    num_failures: int = 0
    """In a row; those of pulls that were under way when the first of them failed are one."""
    failed_at: float = 0.0
    avoided_until: float = 0.0
    tried_until: float = 0.0
    pulls: dict[str, _Pull] = field(default_factory=dict)
    _backlog: float = 0.0
    _backlog_at: float = 0.0

    def bytes_per_s(self, now: float) -> float:
        """Returns the rate to reckon with; 0: unknown."""
        return self.rate * 2 ** min((now - self.measured_at) / _DOUBLES_S, _MOST_DOUBLINGS)

    def backlog(self, now: float) -> float:
        """Returns the bytes that are still to come."""
        came = (now - self._backlog_at) * self.bytes_per_s(now)
        return max(0.0, self._backlog - came)

    def seconds_for(self, num_bytes: int, rate: float, now: float) -> float:
        """Returns how long this many bytes more take at `rate`, with what comes before them or
        beside them; 0 if unknown. Pulls share the path, so a longer one counts as one of this
        size."""
        if not self.is_limit or not rate:
            return 0.0
        shared = sum(min(pull.num_bytes, num_bytes) for pull in self.pulls.values())
        return (min(self.backlog(now), shared) + num_bytes) / rate

    def began(self, name: str, num_bytes: int, now: float) -> None:
        self._backlog, self._backlog_at = self.backlog(now) + num_bytes, now
        self.pulls[name] = _Pull(num_bytes, now)
        self.used_at = now

    def ended(self, name: str, now: float) -> _Pull | None:
        pull = self.pulls.pop(name, None)
        still_open = float(sum(pull.num_bytes for pull in self.pulls.values()))
        self._backlog, self._backlog_at = min(self.backlog(now), still_open), now
        return pull

    def measured(self, rate: float, now: float, *, is_all: bool) -> None:
        """Learns a rate. `is_all`: the path gives no more."""
        believed = self.bytes_per_s(now)
        if is_all and self.is_limit:
            rate = believed + _NEW * (rate - believed)
        elif not is_all:
            self.is_limit = self.is_limit and rate < believed
            rate = max(believed, rate)
        self.is_limit |= is_all
        self.rate, self.measured_at, self.tried_until = rate, now, 0.0

    def is_slow(self, num_bytes: int, local_s: float, now: float) -> bool:
        """Returns whether this many bytes take longer than `local_s`. Where only the measurement's
        age speaks against that, one request tries, and for the others it is so still."""
        if self.seconds_for(num_bytes, self.bytes_per_s(now), now) > local_s:
            return True
        if self.seconds_for(num_bytes, self.rate, now) <= local_s:
            return False
        if now < self.tried_until:
            return True
        self.tried_until = now + _TRY_S
        return False

    def failed(self, began_at: float, now: float) -> None:
        """Avoids the path, twice as long as the last time."""
        if self.num_failures and began_at < self.failed_at:
            return
        self.num_failures += 1
        self.failed_at = now
        self._avoid(now)

    def try_once(self, now: float) -> None:
        """Lets one request through: until it ends, or as long as the path was avoided, others stay
        away."""
        self._avoid(now)

    def _avoid(self, now: float) -> None:
        doublings = min(self.num_failures - 1, _MOST_DOUBLINGS)
        self.avoided_until = now + min(_FIRST_S * 2**doublings, _LONGEST_S)

    def carried(self) -> None:
        """KV has arrived."""
        self.num_failures = 0
        self.avoided_until = 0.0


class KVPaths:
    """All paths, by the prefill node's `host:port`. `on_change`: reports should be made anew."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paths: OrderedDict[str, KVPath] = OrderedDict()
        self.on_change: Callable[[], None] = lambda: None

    def objection(self, address: str, num_bytes: int, local_s: float) -> str:
        """Returns why this many bytes should not be pulled from there, `KV_AVOIDED` or `KV_SLOW`;
        empty: they may. `local_s`: in which the prompt is computed here. The first who comes when a
        path is not avoided any more tries it."""
        now, path = self._clock(), self._paths.get(address)
        if path is None:
            return ""
        if now < path.avoided_until:
            return KV_AVOIDED
        if path.is_slow(num_bytes, local_s, now):
            return KV_SLOW
        if path.num_failures:
            path.try_once(now)
        return ""

    def began(self, address: str, name: str, num_bytes: int) -> None:
        """Notes that a pull has begun; each ends with one of the following."""
        path = self._paths.setdefault(address, KVPath())
        self._paths.move_to_end(address)
        path.began(name, num_bytes, self._clock())
        while len(self._paths) > _MAX_PATHS:
            self._paths.popitem(last=False)

    def arrived(self, address: str, name: str, stats: TransferStats | None) -> None:
        """Learns from KV that is complete."""
        path, now = self._paths.get(address), self._clock()
        if path is None or path.ended(name, now) is None:
            return
        was_avoided = path.num_failures > 0
        path.carried()
        if stats is not None and stats.path_bytes_per_s > 0:
            path.measured(stats.path_bytes_per_s, now, is_all=stats.path_was_full)
        if was_avoided:
            self.on_change()

    def failed(self, address: str, name: str, code: str, waited_s: float = 0.0) -> None:
        """Learns from KV that did not arrive, if it is the path's fault. `waited_s`: in that time
        at least a part of it did not come."""
        path, now = self._paths.get(address), self._clock()
        pull = path.ended(name, now) if path is not None else None
        if path is None or pull is None or code not in OF_A_PATH:
            return
        path.failed(pull.began_at, now)
        most = pull.num_bytes / waited_s if waited_s else 0.0
        if most and (not path.rate or most < path.bytes_per_s(now)):
            path.rate, path.measured_at, path.is_limit = most, now, True
        self.on_change()

    def ended(self, address: str, name: str) -> None:
        """Notes that a pull has ended, and nothing is known of why. Idempotent."""
        path = self._paths.get(address)
        if path is not None:
            path.ended(name, self._clock())

    def report(self) -> Iterator[node_pb2.KVPath]:
        """Yields what routers should know."""
        now = self._clock()
        for address, path in list(self._paths.items()):
            if not path.pulls and now - path.used_at > _FORGOTTEN_S:
                del self._paths[address]
            elif path.is_limit or now < path.avoided_until:
                yield node_pb2.KVPath(
                    prefill_node=address,
                    bytes_per_s=path.bytes_per_s(now) if path.is_limit else 0.0,
                    backlog_bytes=int(path.backlog(now)),
                    avoided_s=max(0.0, path.avoided_until - now),
                    num_pulls=len(path.pulls),
                )
