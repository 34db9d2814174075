"""Whether NIXL is faster than the stream, found out for one peer by reading its window.

1. `begin`    the peer has answered: a slot of its window is read, whatever lies there
2. again, a few times; the quickest counts
3. `rate`     is there; or `error`
"""

from __future__ import annotations

import time

from kv_transfer.transports.nixl.window_reads import PeerMemory, ReadQueue, WindowRead

_NUM_READS = 4
"""The first one makes connections."""


class RateTrial:
    """Reads from `memory` by `queue`."""

    def __init__(self, queue: ReadQueue, memory: PeerMemory) -> None:
        self.rate: float | None = None
        """Bytes a second; None before the end."""
        self.error = ""
        self._queue = queue
        self._memory = memory
        self._num_left = _NUM_READS
        self._best = 0.0
        self._began_at = 0.0

    def begin(self) -> None:
        size = min(self._memory.slot_bytes, self._queue.window.slot_bytes)
        self._began_at = time.monotonic()
        source = self._memory.address
        self._queue.begin(
            WindowRead(self._memory, (0, 0), source, size, on_end=lambda read: self._ended(read))
        )

    def _ended(self, read: WindowRead) -> None:
        self._queue.give_back(read)
        if read.error:
            self.error = read.error
            return
        self._best = max(self._best, read.num_bytes / (time.monotonic() - self._began_at))
        self._num_left -= 1
        if self._num_left:
            self.begin()
        else:
            self.rate = self._best
