"""The producer's side of the stream transport: KV goes to pullers as messages of their calls.

    ready ──▶ staged in host memory (`Stager`), or straight from the blocks (`ZeroCopySends`)
          ──▶ messages of `StreamPull`s; each that leaves renews the export's lease

Everything runs on one event loop. On a device copies run beside it; once an export has ended, a
copy that is on its way may still read its blocks, but nothing looks at what it read. Threads that
send from blocks are waited for before the end is sent.
"""

from __future__ import annotations

from collections.abc import Callable

from edge.h2.out_message import OutMessage
from kv_transfer.config import KVTransferConfig
from kv_transfer.layout import KVLayout
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.staging import StagingPool
from kv_transfer.transports.base import Export, ExportOwner, ProducerTransport, TransportId
from kv_transfer.transports.open_pull import PullTerms
from kv_transfer.transports.stream.chunk_messages import ChunkMessages
from kv_transfer.transports.stream.stager import Stager
from kv_transfer.transports.stream.stream_export import SentChunk, StreamExport, StreamPull
from kv_transfer.transports.stream.zero_copy_sends import ZeroCopySends
from kv_transfer.wire.chunk import HEADER
from kv_transfer.wire.chunk_grid import longest_chunk

_RESERVE_CHUNKS = 4


class StreamProducer(ProducerTransport):
    """Sends exports over the stream, and stages what waits.

    `waits_for_pulls`: pullers may want to read blocks themselves, so for a moment nothing is
    staged for those that have not come.
    """

    id = TransportId.STREAM

    def __init__(
        self,
        config: KVTransferConfig,
        layout: KVLayout,
        rank: int,
        cache: KVCacheView,
        owner: ExportOwner,
        waits_for_pulls: bool,
    ) -> None:
        self._owner = owner
        self.messages = ChunkMessages(layout, rank, config.chunk_bytes)
        chunk_bytes = HEADER.size + longest_chunk(layout, config.chunk_bytes)
        capacity = config.process_staging_bytes
        reserve = min(_RESERVE_CHUNKS, capacity // chunk_bytes // 2)
        self.pool = StagingPool(capacity, chunk_bytes, reserve)
        cache.device.pin(self.pool.memory)
        self.zero_copy = ZeroCopySends(cache, self.pool, self.messages, self._sent, owner)
        self._parts: set[StreamExport] = set()
        self._stager = Stager(self._parts, cache, self.pool, self.messages, self.zero_copy, owner)
        self._waits_for_pulls = waits_for_pulls or self.zero_copy.is_possible

    def advertise(self, puller_host: str) -> bytes:
        return b""

    @property
    def staged_bytes(self) -> int:
        return self.pool.used

    def open(self, export: Export) -> StreamExport:
        stage_after = self._stager.wait_for_puller() if self._waits_for_pulls else 0.0
        part = StreamExport(self, export, stage_after)
        self._parts.add(part)
        return part

    def exports(self) -> list[StreamExport]:
        """Returns those that are open."""
        return list(self._parts)

    async def run(self) -> None:
        await self._stager.run()

    def suits_zero_copy(self, terms: PullTerms) -> bool:
        """Returns what `ZeroCopySends.suits` says."""
        return self.zero_copy.suits(terms)

    def wake(self) -> None:
        """Wakes after progress, a puller, room or an end: something may be staged now."""
        self._stager.wake()

    def next_message(self, pull: StreamPull) -> OutMessage | None:
        """Does what `OpenPull.next_message` asks."""
        entry = pull.next_staged()
        if entry is None:
            return self.zero_copy.next_message(pull)
        message = self.messages.message_for(pull, entry)

        def on_end(is_sent: bool) -> None:
            if is_sent:
                self._sent(pull, entry, len(message) - HEADER.size)
            self.pool.unpin(entry.chunk)

        self.pool.pin(entry.chunk)
        return OutMessage([message], on_end)

    def end(self, part: StreamExport, then: Callable[[], None]) -> None:
        """Does what `ProducerTransfer.end` asks."""
        self._parts.discard(part)
        for entry in part.staged:
            self.pool.drop(entry.chunk)
        part.staged.clear()
        self.zero_copy.release(part, then)
        self.wake()

    def _sent(self, pull: StreamPull, entry: SentChunk | None, num_bytes: int) -> None:
        """Notes that a chunk left; without `entry` it went zero-copy from the blocks."""
        self._owner.was_sent(pull.part.export, num_bytes)
        if pull.spec.repeat or entry is None:
            return
        entry.num_sent += 1
        if entry.num_sent >= pull.num_pullers[pull.grid.position(entry.index).group]:
            self.pool.mark_sent(entry.chunk)
            self.wake()
