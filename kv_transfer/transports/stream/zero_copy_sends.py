"""KV that goes straight from the blocks to a socket.

Where the cache lies in host memory and a puller keeps up, staging would only be one more copy:

    1. `next_message`   a ready chunk of the pull, whose parts are the blocks themselves
    2. sent             it has left the blocks; nothing is kept of it, so it cannot be repeated
       dropped          its call has ended: it is ready again
    3. `keeps_up`       a peer that takes longer than `SLOW_S` for a chunk does not: what it has not
                        taken yet is copied into staging memory, so that the blocks get free, and
                        the rest is staged as for a pull that has not come yet
    4. `let_go`         the transfer has ended: what is on its way is copied, and nobody reads the
                        blocks from then on
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kv_transfer.errors import CorruptChunk
from kv_transfer.layout import PageShape
from kv_transfer.memory.block_views import BlockViews
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.staging import StagingPool
from kv_transfer.producer.send_transfer import Pull, SendTransfer, SentChunk, ZeroCopyChunk
from kv_transfer.transports.stream.chunk_messages import ChunkMessages
from kv_transfer.wire.chunk import HEADER, chunk_head
from kv_transfer.wire.chunk_grid import ChunkGrid
from kv_transfer.wire.out_message import OutMessage
from kv_transfer.wire.pull_wish import PullWish

SLOW_S = 0.02


class ZeroCopySends:
    """`was_sent(pull, entry if it was staged, payload bytes)`; `on_left(transfer)`: a chunk has
    left the blocks, or has to be staged after all."""

    def __init__(
        self,
        cache: KVCacheView,
        pool: StagingPool,
        messages: ChunkMessages,
        was_sent: Callable[[Pull, SentChunk | None, int], None],
        on_left: Callable[[SendTransfer], None],
    ) -> None:
        self._pages = cache.pages
        self._views = BlockViews(cache) if cache.device.copies_at_once else None
        self._pool = pool
        self._messages = messages
        self._was_sent = was_sent
        self._on_left = on_left

    @property
    def is_possible(self) -> bool:
        """Whether sockets can read our blocks."""
        return self._views is not None

    def suits(
        self,
        transfer: SendTransfer,
        wish: PullWish,
        share: tuple[PageShape, ...],
        num_pullers: tuple[int, ...],
        grid: ChunkGrid,
    ) -> bool:
        """Whether this call wants its chunks as they lie in the blocks, and nobody else does."""
        return (
            self._views is not None
            and share == self._pages
            and max(num_pullers) == 1
            and not wish.repeat
            and not wish.direct
            and grid.groups == transfer.grid.groups
        )

    def next_message(self, pull: Pull) -> OutMessage | None:
        """Raises `CorruptChunk` when the pull wants what has gone to another one before it."""
        transfer = pull.transfer
        if pull.wants_any(transfer.gone):
            raise CorruptChunk("the chunk was sent without a copy and cannot be repeated")
        straight = transfer.pop_ready_for(pull)
        if straight is None or self._views is None:
            return None
        place = straight.place
        views = self._views.of(place.group, place.layer, transfer.blocks_of(place))
        header = self._messages.header(transfer, place)
        head = bytearray(HEADER.size)

        def complete() -> None:
            head[:] = chunk_head(header, views)

        straight.message = OutMessage(
            [head, *views], lambda is_sent: self._ended(pull, straight, is_sent), complete
        )
        return straight.message

    def keeps_up(self, transfer: SendTransfer) -> bool:
        """Whether pulls take what is ready. What slow ones have not taken is copied."""
        is_quick = transfer.is_pulled_straight(SLOW_S)
        if not is_quick:
            for straight in list(transfer.straight):
                self._stage(transfer, straight)
        return is_quick

    def let_go(self, transfer: SendTransfer, then: Callable[[], None]) -> None:
        """Calls `then` when no thread reads blocks of the transfer any more: mostly at once."""
        num_reading = 1

        def one_less() -> None:
            nonlocal num_reading
            num_reading -= 1
            if num_reading == 0:
                then()

        for straight in transfer.straight:
            message = straight.message
            if message is not None:
                num_reading += 1
                if straight.staged is None:
                    message.replace(message.joined())
                message.when_unread(one_less)
        one_less()

    def _ended(self, pull: Pull, straight: ZeroCopyChunk, is_sent: bool) -> None:
        transfer, message = pull.transfer, straight.message
        assert message is not None
        transfer.straight.discard(straight)
        if straight.staged is not None:
            self._pool.unpin(straight.staged)
        if transfer.end_reason:
            return
        if is_sent:
            if straight.entry is None:
                transfer.was_sent_straight(straight)
            self._was_sent(pull, straight.entry, message.num_bytes - HEADER.size)
        elif straight.entry is None:
            transfer.put_back(straight)
        self._on_left(transfer)

    def _stage(self, transfer: SendTransfer, straight: ZeroCopyChunk) -> None:
        """A copy takes the place of the blocks, if there is room for one."""
        message = straight.message
        if message is None or straight.staged is not None or self._pool.num_slots == 0:
            return
        chunk = self._pool.take(message.num_bytes, is_awaited=True)
        if chunk is None:
            return
        self._pool.pin(chunk)
        np.copyto(chunk.buffer, np.frombuffer(message.joined(), np.uint8))
        self._pool.publish(chunk)
        straight.staged = chunk
        message.replace(chunk.buffer.data)
        message.when_unread(lambda: self._is_staged(transfer, straight))

    def _is_staged(self, transfer: SendTransfer, straight: ZeroCopyChunk) -> None:
        assert straight.staged is not None
        if transfer.end_reason:
            self._pool.drop(straight.staged)
        else:
            straight.entry = transfer.add_staged(straight.index, straight.staged)
            self._on_left(transfer)
