"""Host memory for KV that is on its way out, bounded.

A staged chunk is the finished wire message: copying blocks out, the checksum and framing are one
pass, and sending it (twice, if it must be repeated) copies nothing in Python. Life of a chunk:

    1. `take_credit`   before the copy is made; refused when the pool is full
    2. `hold`          the copy exists: nothing may displace it, somebody still needs it
    3. `mark_sent`     all pullers have it: kept for a repeat, but displaced when space is needed
    4. `drop`          its transfer has ended; or displaced by `take_credit`

Chunks that nobody pulls yet must leave `reserve_bytes` free, so transfers whose puller is waiting
always get through, whatever lies staged for pullers that never come.
"""

from __future__ import annotations

from kv_transfer.errors import StagingFull


class StagedChunk:
    """One message of the pool. `message` is None once it was displaced or dropped."""

    __slots__ = ("message", "num_bytes")

    def __init__(self, message: bytes) -> None:
        self.message: bytes | None = message
        self.num_bytes = len(message)


class StagingPool:
    """Counts bytes of all messages it holds; never more than `capacity`."""

    def __init__(self, capacity: int, reserve_bytes: int = 0) -> None:
        if not 0 <= reserve_bytes < capacity:
            raise ValueError("the reserve must be smaller than the pool")
        self.capacity = capacity
        self._reserve_bytes = reserve_bytes
        self._credits = 0
        """Bytes promised by `take_credit` and not yet held."""
        self._held = 0
        self._sent: dict[int, StagedChunk] = {}
        """Chunks that may be displaced, by identity, the longest sent first."""
        self.num_displaced = 0

    @property
    def used(self) -> int:
        return self._held + self._credits

    def take_credit(self, num_bytes: int, is_awaited: bool) -> bool:
        """Whether `num_bytes` may be staged now; then `hold` or `return_credit` must follow.

        `is_awaited`: a puller waits for it, so it may use the reserve.

        Raises:
            StagingFull: It could never fit.
        """
        if num_bytes > self.capacity:
            raise StagingFull(
                f"a chunk of {num_bytes} bytes does not fit into {self.capacity} bytes of staging "
                f"memory; raise staging_bytes or lower chunk_bytes"
            )
        limit = self.capacity if is_awaited else self.capacity - self._reserve_bytes
        while self.used + num_bytes > limit and self._sent:
            self._displace()
        if self.used + num_bytes > limit:
            return False
        self._credits += num_bytes
        return True

    def return_credit(self, num_bytes: int) -> None:
        if num_bytes > self._credits:
            raise ValueError("more credit returned than was taken")
        self._credits -= num_bytes

    def hold(self, message: bytes) -> StagedChunk:
        """Turns credit for exactly this message into a chunk."""
        self.return_credit(len(message))
        self._held += len(message)
        return StagedChunk(message)

    def mark_sent(self, chunk: StagedChunk) -> None:
        if chunk.message is not None:
            self._sent[id(chunk)] = chunk

    def drop(self, chunk: StagedChunk) -> None:
        """Idempotent."""
        if chunk.message is not None:
            self._sent.pop(id(chunk), None)
            self._held -= chunk.num_bytes
            chunk.message = None

    def _displace(self) -> None:
        self.drop(next(iter(self._sent.values())))
        self.num_displaced += 1
