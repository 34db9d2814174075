"""Reads chunks that a holder has copied into a slot of its window, and puts them where they belong.

1. `accept`   a message says which chunks are in a slot: all of them are fetched or none
2. a read     brings them into a slot of ours; if that is smaller than the holder's, several reads
              do, one after the other, of whole chunks each
3. its end    if the lease outlasted the read, copies into our blocks are issued, and the chunks
              are not missing any more
4. `arrived`  waits until all reads have ended that way. Raises `PeerLost` for one that did not
5. `stop`     nothing is copied any more. Reads that have begun go on in their slots, which
              serve others when they end
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from kv_transfer.errors import CorruptChunk, PeerLost
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.devices.copy_stream import Numbers
from kv_transfer.transports.chunk_assembler import ChunkAssembler
from kv_transfer.transports.fetch_job import FetchJob
from kv_transfer.transports.group_target import NamedBlocks
from kv_transfer.transports.nixl.packed_chunks import chunk_sizes, num_that_fit, packed_blocks
from kv_transfer.transports.nixl.peers import Peer
from kv_transfer.transports.nixl.window_message import (
    NUM_FIRST_WORDS,
    WORD_BYTES,
    WindowMessage,
    notice_of,
    read_window_message,
)
from kv_transfer.transports.nixl.window_reads import ReadQueue, WindowRead
from kv_transfer.wire.chunk import HEADER, Chunk, ChunkKind
from kv_transfer.wire.chunk_grid import ChunkGrid


@dataclass(frozen=True, slots=True)
class _Part:
    """Chunks that are read at once, and where they begin in the slot of the holder."""

    indices: Numbers
    offset: int
    num_bytes: int


class WindowAssembler(ChunkAssembler):
    """Reads what `peer` says, over the transport with this id. When a transfer ends because nothing
    came for `patience_s`, that is the fault of reads that hang."""

    def __init__(
        self,
        job: FetchJob,
        cache: KVCacheView,
        transport: int,
        peer: Peer,
        queue: ReadQueue,
        patience_s: float,
    ) -> None:
        super().__init__(job, cache)
        self.transport = transport
        self._peer: Peer | None = peer
        self._memory = peer.memory
        self._queue = queue
        self._patience_s = patience_s
        self._fetched: set[int] = set()
        """Chunks that are missing and on their way."""
        self._reads: set[WindowRead] = set()
        self._changed = asyncio.Event()
        self._lost = ""
        """Why something that was on its way did not come."""
        self._is_stopped = False

    @property
    def most_bytes(self) -> int:
        blocks = self._theirs.num_blocks_for(self.job.meta.num_tokens)
        layers = [len(group.layers) for group in self._theirs.groups]
        most_chunks = sum(num * count for num, count in zip(layers, blocks, strict=True))
        words = HEADER.size + WORD_BYTES * (NUM_FIRST_WORDS + most_chunks)
        return max(super().most_bytes, words)

    def accept(self, chunk: Chunk) -> int:
        self.check_on_the_way()
        if chunk.header.kind is not ChunkKind.WINDOW or self._is_stopped:
            raise CorruptChunk(f"a message of kind {chunk.header.kind.name} where none belongs")
        self._check_identity(chunk.header)
        if chunk.header.shape != self._share_code:
            raise CorruptChunk("the peer's window has blocks of another shape than was asked for")
        grid = self._grid_of(chunk.header)
        message = read_window_message(chunk.payload)
        chunks = set(message.indices.tolist())
        if len(chunks) < len(message.indices) or not self._are_awaited(chunks):
            raise CorruptChunk("a chunk is in a window that is not expected here, or twice")
        parts = self._parts_of(grid, message)
        self._fetched |= chunks
        self._fetch(message, parts)
        return 0

    def check_on_the_way(self) -> None:
        if self._lost:
            raise PeerLost(self._lost)

    async def arrived(self) -> None:
        while self._reads and not self._lost:
            self._changed.clear()
            await self._changed.wait()
        self.check_on_the_way()

    def stop(self) -> None:
        super().stop()
        self._is_stopped = True
        for read in list(self._reads):
            if self._queue.withdraw(read):
                self._reads.discard(read)
            elif read.waited_s > self._patience_s / 2 and self._peer is not None:
                self._peer.give_up(f"a read did not end within {read.waited_s:.1f} s")

    def close(self) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.release()

    def _are_awaited(self, chunks: set[int]) -> bool:
        return chunks <= self._missing and chunks.isdisjoint(self._fetched)

    def _parts_of(self, grid: ChunkGrid, message: WindowMessage) -> deque[_Part]:
        """Returns the chunks of a message in parts that fit into a slot of ours. Raises
        `CorruptChunk` for what cannot be in the peer's slot, or a chunk that fits into none."""
        sizes = chunk_sizes(grid, self.job.source.share, message.indices)
        room, memory = self._queue.window.slot_bytes, self._memory
        if message.slot >= memory.num_slots or sizes.sum() > memory.slot_bytes:
            raise CorruptChunk("a message about a window goes beyond it")
        if sizes.max() > room:
            raise CorruptChunk(f"a chunk of {sizes.max()} bytes is longer than was said")
        parts: deque[_Part] = deque()
        first = offset = 0
        while first < len(sizes):
            count = num_that_fit(sizes[first:], room)
            num_bytes = int(sizes[first : first + count].sum())
            parts.append(_Part(message.indices[first : first + count], offset, num_bytes))
            first, offset = first + count, offset + num_bytes
        return parts

    def _fetch(self, message: WindowMessage, parts: deque[_Part]) -> None:
        """Begins to read the first of these parts; the others follow."""
        part, memory = parts.popleft(), self._memory
        read = WindowRead(
            memory,
            message.lease,
            memory.address + message.slot * memory.slot_bytes + part.offset,
            part.num_bytes,
            b"" if parts else notice_of(message.lease),
            lambda read: self._ended(read, message, part, parts),
        )
        self._reads.add(read)
        self._queue.begin(read)

    def _ended(
        self, read: WindowRead, message: WindowMessage, part: _Part, rest: deque[_Part]
    ) -> None:
        """Records that `part` is in our slot, or will never be; `rest` comes then."""
        self._reads.discard(read)
        self._changed.set()
        if self._is_stopped or read.error or read.word != message.lease[1]:
            self._queue.give_back(read)
            self._note_loss(read)
            return
        self._copy(read, part.indices)
        if rest:
            self._fetch(message, rest)
        self.on_kv(part.num_bytes)

    def _note_loss(self, read: WindowRead) -> None:
        if read.error and self._peer is not None:
            self._peer.give_up(read.error)
        if not self._is_stopped:
            why = read.error or "it let go of its window while that was read"
            self._lost = f"{self.job.meta.peer.engine_id}: {why}"

    def _copy(self, read: WindowRead, indices: Numbers) -> None:
        """Issues copies of chunks in our slot, which is free when they are done."""
        assert self._grid is not None and read.slot is not None
        start = self._queue.window.address_of(read.slot)
        for blocks in packed_blocks(self._grid, self.job.source.share, indices):
            places = start + blocks.offsets
            named = NamedBlocks(blocks.layers, blocks.numbers, places)
            self._targets[blocks.group].copy_compact(named, from_host=False)
        self._cache.copies.then(lambda: self._queue.give_back(read))
        self._missing.difference_update(indices.tolist())
        self._fetched.difference_update(indices.tolist())
