"""Which blocks lie in the disk tier, by hash, and in which order they were used.

written ── a process could not write ──▶ resting: only read ── after a while ──▶ written
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

_REST_S = 30.0
"""A disk that is full, or read-only, is so for minutes; each try writes, and takes back, blocks."""

logger = logging.getLogger(__name__)


class DiskIndex:
    """At most `capacity` blocks; `remove` is notified of those that must go."""

    def __init__(self, capacity: int, remove: Callable[[list[bytes]], None]) -> None:
        self._capacity = capacity
        self._remove = remove
        self._names: OrderedDict[bytes, float] = OrderedDict()
        """Hashes, and since when they are here; evicted from the front."""
        self.num_evicted = 0
        self.residency_s = 0.0
        """Seconds that evicted blocks have been here, summed."""
        self.num_unwritten = 0
        self._reads: list[tuple[int, float]] = []
        self._fault = ""
        """Why blocks could not be written; empty: the last ones were."""
        self._rests_until = 0.0

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def took(self, num_blocks: int, seconds: float) -> None:
        """Records that this many blocks were read for a prompt, and came."""
        self._reads.append((num_blocks, seconds))

    def take_reads(self) -> list[tuple[int, float]]:
        """Returns the blocks and the seconds of each read since the last call."""
        reads, self._reads = self._reads, []
        return reads

    def add(self, names: Iterable[bytes]) -> None:
        """Records blocks that are whole on disk; those used longest ago go for them."""
        now, gone = time.monotonic(), []
        for name in names:
            self._names.setdefault(name, now)
            self._names.move_to_end(name)
        while len(self._names) > self._capacity:
            name, since = self._names.popitem(last=False)
            self.residency_s += now - since
            gone.append(name)
        if gone:
            self.num_evicted += len(gone)
            self._remove(gone)

    def written(self, whole: Sequence[bytes], tried: Sequence[bytes]) -> None:
        """Records the blocks that all have written, of those that were tried. Of the others
        some may have their shares, which are removed: nothing would count them."""
        self.add(whole)
        partial = [name for name in tried if name not in whole]
        if partial:
            self._remove(partial)
        if self.is_resting:
            self.num_unwritten += len(partial)
        elif self._fault and whole:
            self._fault = ""
            logger.info("KV is written to the disk tier again")

    @property
    def is_resting(self) -> bool:
        return time.monotonic() < self._rests_until

    def rest(self, reason: str) -> None:
        """Has nothing written for a while, since a process could not. Says each reason once."""
        self._rests_until = time.monotonic() + _REST_S
        if reason != self._fault:
            self._fault = reason
            logger.warning(
                "KV cannot be written to the disk tier, and serving goes on: %s; what is there is "
                "still read, and writing is tried again every %.0f s",
                reason,
                _REST_S,
            )

    def use(self, name: bytes) -> None:
        self._names.move_to_end(name)

    def drop(self, names: Iterable[bytes]) -> None:
        """Forgets blocks that cannot be used, wherever some process still has its share."""
        known = [name for name in names if self._names.pop(name, None) is not None]
        if known:
            self._remove(known)

    def keep_common(self, told: Sequence[Iterable[bytes]]) -> None:
        """Keeps blocks that every process which has reported holds; removes the rest, with
        unreported shares."""
        shares = [set(names) for names in told]
        lost = [name for name in self._names if not all(name in one for one in shares)]
        for name in lost:
            del self._names[name]
        orphans = [name for name in set().union(lost, *shares) if name not in self._names]
        if orphans:
            self._remove(orphans)

    def clear(self) -> None:
        """Forgets all; files stay as they are."""
        self._names.clear()
