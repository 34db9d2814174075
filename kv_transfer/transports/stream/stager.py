"""Copies KV that is ready out of the blocks into staging memory, transfer by transfer.

    1. `wake`     something has changed: progress, a puller, room, an end
    2. a round    one chunk of each transfer that has one ready and may stage it, those with a
                  waiting puller first; again while any was copied
    3. `staged`   the copy is done, which on a device is later than it was issued: the chunk can be
                  sent, or is dropped because its transfer has ended meanwhile

Not staged are chunks that a puller takes from the blocks (`zero_copy_sends`), or copies itself on
the same host; and for a moment nothing of a transfer whose puller may want one of these.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kv_transfer.errors import KVTransferError
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.staging import StagedChunk, StagingPool
from kv_transfer.producer.send_transfer import SendTransfer
from kv_transfer.state import TransferTable
from kv_transfer.transports.stream.chunk_messages import ChunkMessages
from kv_transfer.transports.stream.zero_copy_sends import SLOW_S, ZeroCopySends
from kv_transfer.wire.chunk import HEADER, fill_header
from kv_transfer.wire.chunk_grid import ChunkPlace

_WAIT_FOR_PULL_S = 0.05
"""A puller may want no copy; it comes at about the same time as the offer."""


class Stager:
    """`staged` hears of every copy that is done, `fail` of a chunk that can never be staged."""

    def __init__(
        self,
        transfers: TransferTable[SendTransfer],
        cache: KVCacheView,
        pool: StagingPool,
        messages: ChunkMessages,
        straight: ZeroCopySends,
        staged: Callable[[SendTransfer], None],
        fail: Callable[[SendTransfer, str], None],
    ) -> None:
        self._transfers = transfers
        self._cache = cache
        self._pool = pool
        self._messages = messages
        self._straight = straight
        self._staged = staged
        self._fail = fail
        self._work = asyncio.Event()
        self._next_look: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        self._work.set()

    def wait_for_puller(self, transfer: SendTransfer) -> None:
        """It has just been offered, and its puller may want no copy."""
        transfer.stage_after = time.monotonic() + _WAIT_FOR_PULL_S
        asyncio.get_running_loop().call_later(_WAIT_FOR_PULL_S, self.wake)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            if self._stage_round():
                self.wake()
                await asyncio.sleep(0)

    def _stage_round(self) -> bool:
        """Whether anything could be staged; if not, whoever makes it possible calls `wake`."""
        any_staged = False
        for transfer in sorted(self._transfers, key=lambda transfer: not transfer.pulls):
            if self._straight.keeps_up(transfer):
                self._look_again_soon()
            elif transfer.has_ready and self._stage_one(transfer):
                any_staged = True
        return any_staged

    def _look_again_soon(self) -> None:
        """A peer that keeps up now may not do so for long."""
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(SLOW_S, self._look)

    def _look(self) -> None:
        self._next_look = None
        self.wake()

    def _stage_one(self, transfer: SendTransfer) -> bool:
        if transfer.name_ready():
            return True
        if not transfer.pulls and time.monotonic() < transfer.stage_after:
            return False
        chunk = self._take_room(transfer)
        if chunk is None:
            return False
        place = transfer.pop_ready()
        # Whatever becomes of the transfer, the copy ends before the slot serves another.
        self._pool.pin(chunk)
        payload = int(chunk.buffer.ctypes.data) + HEADER.size
        self._cache.copy_out(place.group, place.layer, transfer.blocks_of(place), payload)
        self._cache.copies.then(lambda: self._copied(transfer, place, chunk))
        return True

    def _take_room(self, transfer: SendTransfer) -> StagedChunk | None:
        """For the chunk that is ready; None: there is no room now."""
        place = transfer.next_ready
        page_bytes = self._cache.pages[place.group].num_bytes
        num_bytes = HEADER.size + len(transfer.grid.blocks_of(place)) * page_bytes
        try:
            return self._pool.take(num_bytes, is_awaited=bool(transfer.pulls))
        except KVTransferError as error:
            self._fail(transfer, str(error))
            return None

    def _copied(self, transfer: SendTransfer, place: ChunkPlace, chunk: StagedChunk) -> None:
        if transfer.end_reason:
            self._pool.drop(chunk)
        else:
            fill_header(chunk.buffer, self._messages.header(transfer, place))
            self._pool.publish(chunk)
            transfer.add_staged(transfer.grid.index(place), chunk)
        self._pool.unpin(chunk)
        self.wake()
        self._staged(transfer)
