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

from kv_transfer.errors import KVTransferError
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.staging import StagedChunk, StagingPool
from kv_transfer.transports.base import ExportOwner
from kv_transfer.transports.stream.chunk_messages import ChunkMessages
from kv_transfer.transports.stream.stream_export import StreamExport
from kv_transfer.transports.stream.zero_copy_sends import SLOW_S, ZeroCopySends
from kv_transfer.wire.chunk import HEADER, ChunkHeader, fill_header
from kv_transfer.wire.chunk_grid import ChunkPlace

_WAIT_FOR_PULL_S = 0.05
"""A puller may want no copy; it comes at about the same time as the export."""


class Stager:
    """Works for all of `parts`, which others change. `owner` is called for chunks that have left
    their blocks, and of one that can never be staged."""

    def __init__(
        self,
        parts: set[StreamExport],
        cache: KVCacheView,
        pool: StagingPool,
        messages: ChunkMessages,
        zero_copy: ZeroCopySends,
        owner: ExportOwner,
    ) -> None:
        self._parts = parts
        self._cache = cache
        self._pool = pool
        self._messages = messages
        self._zero_copy = zero_copy
        self._owner = owner
        self._work = asyncio.Event()
        self._next_look: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        self._work.set()

    def wait_for_puller(self) -> float:
        """Returns until when nothing is staged for an export that was opened just now."""
        # In this order: a look that comes before staging is allowed would be the last one.
        until = time.monotonic() + _WAIT_FOR_PULL_S
        asyncio.get_running_loop().call_later(_WAIT_FOR_PULL_S, self.wake)
        return until

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            if self._stage_round():
                self.wake()
                await asyncio.sleep(0)

    def _stage_round(self) -> bool:
        """Returns whether anything could be staged; if not, what makes it possible wakes this
        stager."""
        any_staged = False
        for part in sorted(self._parts, key=lambda part: not part.pulls):
            if self._zero_copy.keeps_up(part):
                self._look_again_soon()
            elif part.has_ready and part.may_stage and self._stage_one(part):
                any_staged = True
        return any_staged

    def _look_again_soon(self) -> None:
        """A peer that keeps up now may not do so for long."""
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(SLOW_S, self._look)

    def _look(self) -> None:
        self._next_look = None
        self.wake()

    def _stage_one(self, part: StreamExport) -> bool:
        chunk = self._take_room(part)
        if chunk is None:
            return False
        place = part.pop_ready()
        # Whatever becomes of the transfer, the copy ends before the slot serves another.
        self._pool.pin(chunk)
        payload = int(chunk.buffer.ctypes.data) + HEADER.size
        header = self._messages.header(part.export, place)
        self._cache.copy_out(place.group, place.layer, part.export.blocks_of(place), payload)
        self._cache.copies.then(lambda: self._copied(part, place, header, chunk))
        return True

    def _take_room(self, part: StreamExport) -> StagedChunk | None:
        """Returns room for the chunk that is ready; None: there is none now."""
        place = part.next_ready
        page_bytes = self._cache.pages[place.group].num_bytes
        num_bytes = HEADER.size + len(part.export.grid.blocks_of(place)) * page_bytes
        try:
            return self._pool.take(num_bytes, is_awaited=bool(part.pulls))
        except KVTransferError as error:
            self._owner.fail(part.export, str(error))
            return None

    def _copied(
        self, part: StreamExport, place: ChunkPlace, header: ChunkHeader, chunk: StagedChunk
    ) -> None:
        """Records that a chunk is copied.

        `header`: of the blocks that were copied; the grid may have lost some meanwhile.
        """
        if part.export.end_reason:
            self._pool.drop(chunk)
        else:
            fill_header(chunk.buffer, header)
            self._pool.publish(chunk)
            part.add_staged(part.export.grid.index(place), chunk)
        self._pool.unpin(chunk)
        self.wake()
        self._owner.left_blocks(part.export)
