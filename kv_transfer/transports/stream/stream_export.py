"""One export over the stream: chunks on their way from the blocks to sockets.

1. `ready`                     chunks are computed
2. `pop_ready` / `add_staged`  the stager copies them out, as staging memory allows
   `pop_ready_for` / `sent_zero_copy`   a pull that waits gets a chunk straight from the
                               blocks; until it is sent it is in `zero_copies`
3. `StreamPull`s read staged chunks in the order in which they were staged
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from edge.h2.out_message import OutMessage
from kv_transfer.memory.staging import StagedChunk, StagingPool
from kv_transfer.transports.base import Export, ProducerTransfer
from kv_transfer.transports.open_pull import OpenPull, PullTerms
from kv_transfer.wire.chunk_grid import ChunkPlace


class StreamOwner(Protocol):
    """The part of `StreamProducer` that an export needs."""

    @property
    def pool(self) -> StagingPool: ...
    def wake(self) -> None: ...
    def suits_zero_copy(self, terms: PullTerms) -> bool: ...
    def next_message(self, pull: StreamPull) -> OutMessage | None: ...
    def end(self, part: StreamExport, then: Callable[[], None]) -> None: ...


class SentChunk:
    """A staged chunk, and how many pulls have carried it."""

    __slots__ = ("chunk", "index", "num_sent")

    def __init__(self, index: int, chunk: StagedChunk) -> None:
        self.index = index
        self.chunk = chunk
        self.num_sent = 0


class ZeroCopyChunk:
    """A chunk on its way from the blocks to a socket. `staged` is the copy that was made after
    all, because the peer is slow; `entry` exists once nothing reads the blocks any more."""

    __slots__ = ("entry", "index", "message", "place", "since", "staged")

    def __init__(self, index: int, place: ChunkPlace) -> None:
        self.index = index
        self.place = place
        self.since = time.monotonic()
        self.message: OutMessage | None = None
        self.staged: StagedChunk | None = None
        self.entry: SentChunk | None = None


class StreamExport(ProducerTransfer):
    """One export over the stream.

    `stage_after`: until then nothing is staged for a puller that is not here.
    """

    def __init__(self, owner: StreamOwner, export: Export, stage_after: float) -> None:
        self.export = export
        self.stage_after = stage_after
        self.pulls: set[StreamPull] = set()
        self.staged: list[SentChunk] = []
        """In the order in which they were staged, which is the order in which they are sent."""
        self.zero_copies: set[ZeroCopyChunk] = set()
        self.gone: set[int] = set()
        """Chunks that went straight to their puller: nothing is kept of them."""
        self._owner = owner
        self._ready: deque[ChunkPlace] = deque()
        self._in_blocks = set(export.own_chunks())
        """Chunks of which the blocks hold the only copy."""

    # As a `ProducerTransfer` ------------------------------------------------------------------

    @property
    def blocks_are_free(self) -> bool:
        return not self._in_blocks

    def ready(self, indices: Sequence[int]) -> None:
        for index in indices:
            if index in self._in_blocks:
                self._ready.append(self.export.grid.position(index))
                self._wake_zero_copy(index)
        self._owner.wake()

    def narrow(self) -> None:
        grid, wanted = self.export.grid, set(self.export.own_chunks())
        self._in_blocks &= wanted
        self._ready = deque(place for place in self._ready if grid.index(place) in wanted)
        for entry in self.staged:
            if entry.index not in wanted:
                self._owner.pool.mark_sent(entry.chunk)

    def open_pull(self, terms: PullTerms) -> OpenPull:
        pull = StreamPull(self._owner, self, terms)
        self.pulls.add(pull)
        self._owner.wake()
        return pull

    def close_pull(self, pull: OpenPull) -> None:
        self.pulls = {other for other in self.pulls if other is not pull}

    def end(self, then: Callable[[], None]) -> None:
        self._ready.clear()
        self._owner.end(self, then)

    # What becomes of ready chunks -------------------------------------------------------------

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    @property
    def next_ready(self) -> ChunkPlace:
        """Returns what `pop_ready` would return."""
        return self._ready[0]

    def pop_ready(self) -> ChunkPlace:
        """Returns what to stage next; must then be given to `add_staged`."""
        return self._ready.popleft()

    def add_staged(self, index: int, chunk: StagedChunk) -> SentChunk:
        """A copy of the chunk is staged."""
        entry = SentChunk(index, chunk)
        self.staged.append(entry)
        self._left_blocks(index)
        for pull in self.pulls:
            if pull.wants(index):
                pull.wake.set()
        return entry

    def pop_ready_for(self, pull: StreamPull) -> ZeroCopyChunk | None:
        """Returns a ready chunk that this pull wants and may have straight from the blocks."""
        if not pull.is_zero_copy:
            return None
        for i, place in enumerate(self._ready):
            index = self.export.grid.index(place)
            if pull.take(index):
                del self._ready[i]
                sending = ZeroCopyChunk(index, place)
                self.zero_copies.add(sending)
                return sending
        return None

    def put_back(self, sending: ZeroCopyChunk) -> None:
        """It was not sent: it has to be staged now."""
        self._ready.appendleft(sending.place)

    def sent_zero_copy(self, sending: ZeroCopyChunk) -> None:
        """It has left the blocks, and nothing is kept of it."""
        self.gone.add(sending.index)
        self._left_blocks(sending.index)

    def keeps_up(self, slow_s: float) -> bool:
        """Returns whether pulls take what is ready: then nothing needs to be staged. A peer that
        takes longer than `slow_s` for a chunk, from the blocks or staged, does not keep up."""
        pulls = [pull for pull in self.pulls if pull.is_zero_copy]
        if not pulls:
            return False
        begun = [sending.since for sending in self.zero_copies]
        begun += [pull.writes_since for pull in pulls if pull.writes_since is not None]
        return min(begun, default=math.inf) > time.monotonic() - slow_s

    @property
    def may_stage(self) -> bool:
        """Returns whether something may want staged chunks now."""
        if self.pulls:
            return True
        return not self.export.keeps_blocks and time.monotonic() >= self.stage_after

    def _left_blocks(self, index: int) -> None:
        self._in_blocks.discard(index)
        self.export.saved(self.export.grid.position(index))

    def _wake_zero_copy(self, index: int) -> None:
        for pull in self.pulls:
            if pull.is_zero_copy and pull.wants(index):
                pull.wake.set()


class StreamPull(OpenPull):
    """One pull of an export over the stream.

    `is_zero_copy`: it alone wants its chunks, and as they lie in the blocks.
    """

    def __init__(self, owner: StreamOwner, part: StreamExport, terms: PullTerms) -> None:
        super().__init__(terms)
        self.part = part
        self.is_zero_copy = owner.suits_zero_copy(terms)
        self._owner = owner
        self._cursor = 0

    def next_staged(self) -> SentChunk | None:
        """Returns the next staged chunk of this stream that was not returned before."""
        chunks = self.part.staged
        while self._cursor < len(chunks):
            entry = chunks[self._cursor]
            self._cursor += 1
            if self.take(entry.index):
                return entry
        return None

    def next_message(self) -> OutMessage | None:
        return self._owner.next_message(self)
