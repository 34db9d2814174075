"""Remembers the sessions that were learnt of last: where they live, and how often they came."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from router.request.request_history import RequestHistory

_KEPT = 1024


@dataclass(slots=True)
class SessionSeen:
    """Is one session. `last_at`: Unix seconds."""

    tenant: str
    source: str
    num_requests: int = 0
    num_tokens: int = 0
    last_at: float = 0.0
    decode: str = ""
    prefill: str = ""


class SessionTable:
    """Holds the sessions, the one learnt of last at the end."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, SessionSeen] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def note(self, record: RequestHistory) -> None:
        """Takes in a request that has ended on a node."""
        if not record.session or not record.decode:
            return
        seen = self._seen.pop(record.session, None)
        if seen is None:
            seen = SessionSeen(record.tenant, record.session_source)
            if len(self._seen) >= _KEPT:
                self._seen.popitem(last=False)
        self._seen[record.session] = seen
        seen.num_requests += 1
        seen.num_tokens += record.num_tokens
        seen.last_at = time.time()
        seen.decode, seen.prefill = record.decode, record.prefill

    def newest(self, count: int) -> Iterator[tuple[bytes, SessionSeen]]:
        return islice(reversed(self._seen.items()), count)

    def by_node(self, since: float) -> Counter[str]:
        """Returns how many sessions were on each node, learnt of since then."""
        counts: Counter[str] = Counter()
        for seen in reversed(self._seen.values()):
            if seen.last_at < since:
                break
            counts.update({seen.decode, seen.prefill} - {""})
        return counts
