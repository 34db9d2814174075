"""Keeps the last five minutes of the cluster in slots of five seconds, for figures and curves.

    requests end ── ended ──▶ ┐                      ┌──▶ over(): one figure of the last minute
    tokens come ─── gap ────▶ ├─ the newest slot ─ … ┤
    each second ── sample ──▶ ┘  (61 are kept)       └──▶ curve(): a value of each slot

What requests tell is of this router. What nodes report (tokens, what runs and waits) is of the
whole cluster, whichever router asked for it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from router.observe.status.log_histogram import LogHistogram
from router.request.request_history import RequestHistory

SLOT_S = 5.0
NUM_SLOTS = 60
OVER_SLOTS = 12
"""Figures are of the last minute."""
_OK, _CLIENT_LEFT = 200, 499
_LIMITED = 429


def is_failure(record: RequestHistory) -> bool:
    """Returns whether the service, not the client, is to blame, as alerts count it."""
    return record.broken or record.status >= 500


@dataclass(slots=True)
class Slot:
    """Holds what happened in five seconds. `samples` counts those of the gauges, which are sums."""

    began_at: float
    num_requests: int = 0
    num_failed: int = 0
    num_limited: int = 0
    num_left: int = 0
    ttft: LogHistogram = field(default_factory=LogHistogram)
    itl: LogHistogram = field(default_factory=LogHistogram)
    queue: LogHistogram = field(default_factory=LogHistogram)
    transfer: LogHistogram = field(default_factory=LogHistogram)
    join: LogHistogram = field(default_factory=LogHistogram)
    prefill: LogHistogram = field(default_factory=LogHistogram)
    transfer_bytes: int = 0
    num_moves: int = 0
    by_tenant: Counter[str] = field(default_factory=Counter)
    failed_by_tenant: Counter[str] = field(default_factory=Counter)
    tokens_by_tenant: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    running: float = 0.0
    waiting: float = 0.0
    tokens_in: float = 0.0
    tokens_out: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """Is the cluster at one moment; tokens are per second."""

    running: int = 0
    waiting: int = 0
    tokens_in: float = 0.0
    tokens_out: float = 0.0


class RecentFigures:
    """Holds the slots; the newest is the last. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slots: deque[Slot] = deque([Slot(clock())], maxlen=NUM_SLOTS + 1)

    def gap(self, seconds: float) -> None:
        """Counts the time between two pieces of a stream."""
        self._slots[-1].itl.add(seconds)

    def ended(self, record: RequestHistory) -> None:
        slot = self._slots[-1]
        slot.num_requests += 1
        slot.num_failed += is_failure(record)
        slot.num_limited += record.status == _LIMITED
        slot.num_left += record.status == _CLIENT_LEFT
        slot.num_moves += len(record.moves)
        if record.tenant:
            slot.by_tenant[record.tenant] += 1
            slot.failed_by_tenant[record.tenant] += is_failure(record)
            slot.tokens_by_tenant[record.tenant] += record.num_tokens
        if record.first_token_s and record.status == _OK:
            slot.ttft.add(record.first_token_s)
            slot.queue.add(record.queue_s)
            self._count_stages(slot, record)

    def sample(self, gauges: Gauges) -> None:
        """Takes in how the cluster is now, and begins another slot when it is time to. To be called
        each second."""
        now = self._clock()
        if now - self._slots[-1].began_at >= SLOT_S:
            self._slots.append(Slot(now))
        slot = self._slots[-1]
        slot.samples += 1
        slot.running += gauges.running
        slot.waiting += gauges.waiting
        slot.tokens_in += gauges.tokens_in
        slot.tokens_out += gauges.tokens_out

    def total(self, num_slots: int = OVER_SLOTS) -> Slot:
        """Returns the last slots as one; `began_at` is that of the first."""
        slots = list(self._slots)[-num_slots:]
        total = Slot(slots[0].began_at)
        for slot in slots:
            _add(total, slot)
        return total

    def curve(self, value: Callable[[Slot], float | None]) -> list[float | None]:
        """Returns a value of each complete slot, oldest first; None where there is none."""
        return [value(slot) for slot in self._complete()]

    def age_s(self, slot: Slot) -> float:
        """Returns the seconds since `slot` began, at least 1."""
        return max(1.0, self._clock() - slot.began_at)

    def _complete(self) -> Iterable[Slot]:
        return list(self._slots)[:-1]

    def _count_stages(self, slot: Slot, record: RequestHistory) -> None:
        times = record.times
        slot.prefill.add(times.prefill if times else record.prefill_s)
        if times is None or not times.kv_bytes:
            return
        slot.transfer_bytes += times.kv_bytes
        slot.transfer.add(times.kv_last - times.kv_first)
        if times.second:
            slot.join.add(times.second - max(times.first, times.kv_last))


_SUMS = (
    "num_requests", "num_failed", "num_limited", "num_left", "transfer_bytes", "num_moves",
    "samples", "running", "waiting", "tokens_in", "tokens_out",
)  # fmt: skip
_HISTOGRAMS = "ttft", "itl", "queue", "transfer", "join", "prefill"
_COUNTERS = "by_tenant", "failed_by_tenant", "tokens_by_tenant"


def _add(total: Slot, slot: Slot) -> None:
    for name in _SUMS:
        setattr(total, name, getattr(total, name) + getattr(slot, name))
    for name in _HISTOGRAMS:
        getattr(total, name).merge(getattr(slot, name))
    for name in _COUNTERS:
        getattr(total, name).update(getattr(slot, name))
