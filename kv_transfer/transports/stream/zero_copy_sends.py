"""KV that goes straight from the blocks to a socket.

Where the cache lies in host memory and a puller keeps up, staging would only be one more copy:

    1. `next_message`   a ready chunk of the pull, whose parts are the blocks themselves
    2. sent             it has left the blocks; nothing is kept of it, so it cannot be repeated
       dropped          its call has ended: it is ready again
    3. `keeps_up`       a peer that takes longer than `SLOW_S` for a chunk does not: what it has not
                        taken yet is copied into staging memory, so that the blocks get free, and
                        the rest is staged as for a pull that has not come yet
    4. `release`         the transfer has ended: what is on its way is copied, and nothing reads the
                        blocks from then on
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edge.h2.out_message import OutMessage
from kv_transfer.errors import CorruptChunk
from kv_transfer.memory.block_views import BlockViews
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.staging import StagingPool
from kv_transfer.transports.base import ExportOwner
from kv_transfer.transports.open_pull import PullTerms
from kv_transfer.transports.stream.chunk_messages import ChunkMessages
from kv_transfer.transports.stream.stream_export import (
    SentChunk,
    StreamExport,
    StreamPull,
    ZeroCopyChunk,
)
from kv_transfer.wire.chunk import HEADER, chunk_head

SLOW_S = 0.02


class ZeroCopySends:
    """`was_sent(pull, entry if it was staged, payload bytes)`; `owner` is called for a chunk that
    has left the blocks, or has to be staged after all."""

    def __init__(
        self,
        cache: KVCacheView,
        pool: StagingPool,
        messages: ChunkMessages,
        was_sent: Callable[[StreamPull, SentChunk | None, int], None],
        owner: ExportOwner,
    ) -> None:
        self._pages = cache.pages
        self._views = BlockViews(cache) if cache.device.copies_at_once else None
        self._pool = pool
        self._messages = messages
        self._was_sent = was_sent
        self._owner = owner

    @property
    def is_possible(self) -> bool:
        """Returns whether sockets can read our blocks."""
        return self._views is not None

    def suits(self, terms: PullTerms) -> bool:
        """Returns whether a pull wants its chunks as they lie in the blocks, and nothing else
        does."""
        return (
            self._views is not None
            and terms.share == self._pages
            and max(terms.num_pullers) == 1
            and not terms.spec.repeat
        )

    def next_message(self, pull: StreamPull) -> OutMessage | None:
        """Raises `CorruptChunk` when the pull wants what has gone to another one before it."""
        part = pull.part
        if pull.wants_any(part.gone):
            raise CorruptChunk("the chunk was sent without a copy and cannot be repeated")
        sending = part.pop_ready_for(pull)
        if sending is None or self._views is None:
            return None
        place = sending.place
        views = self._views.of(place.group, place.layer, part.export.blocks_of(place))
        header = self._messages.header(part.export, place)
        head = bytearray(HEADER.size)

        def complete() -> None:
            head[:] = chunk_head(header, views)

        sending.message = OutMessage(
            [head, *views], lambda is_sent: self._ended(pull, sending, is_sent), complete
        )
        return sending.message

    def keeps_up(self, part: StreamExport) -> bool:
        """Returns whether pulls take what is ready. What slow ones have not taken is copied."""
        is_quick = part.keeps_up(SLOW_S)
        if not is_quick:
            for sending in list(part.zero_copies):
                self._stage(part, sending)
        return is_quick

    def release(self, part: StreamExport, then: Callable[[], None]) -> None:
        """Calls `then` when no thread reads blocks of the export any more: mostly at once."""
        num_reading = 1

        def one_less() -> None:
            nonlocal num_reading
            num_reading -= 1
            if num_reading == 0:
                then()

        for sending in part.zero_copies:
            message = sending.message
            if message is not None:
                num_reading += 1
                if sending.staged is None:
                    message.replace(message.joined())
                message.when_unread(one_less)
        one_less()

    def _ended(self, pull: StreamPull, sending: ZeroCopyChunk, is_sent: bool) -> None:
        part, message = pull.part, sending.message
        assert message is not None
        part.zero_copies.discard(sending)
        if sending.staged is not None:
            self._pool.unpin(sending.staged)
        if part.export.end_reason:
            return
        if is_sent:
            if sending.entry is None:
                part.sent_zero_copy(sending)
            self._was_sent(pull, sending.entry, message.num_bytes - HEADER.size)
        elif sending.entry is None:
            part.put_back(sending)
        self._owner.left_blocks(part.export)

    def _stage(self, part: StreamExport, sending: ZeroCopyChunk) -> None:
        """A copy takes the place of the blocks, if there is room for one."""
        message = sending.message
        if message is None or sending.staged is not None or self._pool.num_slots == 0:
            return
        chunk = self._pool.take(message.num_bytes, is_awaited=True)
        if chunk is None:
            return
        self._pool.pin(chunk)
        np.copyto(chunk.buffer, np.frombuffer(message.joined(), np.uint8))
        self._pool.publish(chunk)
        sending.staged = chunk
        message.replace(chunk.buffer.data)
        message.when_unread(lambda: self._is_staged(part, sending))

    def _is_staged(self, part: StreamExport, sending: ZeroCopyChunk) -> None:
        assert sending.staged is not None
        if part.export.end_reason:
            self._pool.drop(sending.staged)
        else:
            sending.entry = part.add_staged(sending.index, sending.staged)
            self._owner.left_blocks(part.export)
