"""Consumer: one PullKV call, repeated once if chunks arrived damaged.

1. the call is made; messages arrive, in any order of chunks
2. each is received into the blocks where it belongs, or into memory from which it is copied, as
   the stream's `ChunkAssembler` says; damaged ones are counted and stay missing
3. END; what the messages announced but did not bring arrives
4. if chunks are missing, a second call asks for exactly those
5. still missing: `CorruptChunk`
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kv_transfer.errors import CorruptChunk, PeerLost
from kv_transfer.memory.staging import StagedChunk
from kv_transfer.stages import ALL_LAYERS
from kv_transfer.transports.chunk_assembler import ChunkAssembler
from kv_transfer.transports.fetch_job import FetchJob
from kv_transfer.wire.chunk import (
    HEADER,
    ByteArray,
    Checksum,
    Chunk,
    ChunkHeader,
    ChunkKind,
    decode_head,
)
from kv_transfer.wire.pull_client import PullClient
from tandem_pb import kv_transfer_pb2 as pb

_MAX_REFUSED = 16
"""Damaged chunks of one call. More than that is not an accident of the link."""


class PullStream:
    """Pulls one stream of a transfer.

    `assembler`: where its chunks belong, and over which transport they come; `client` makes the
    calls. `last_message_at`: when a message last came; `last_kv_at`: when a part of a message
    with KV last came, or KV beside the call. `on_bytes` is notified of all KV.
    """

    def __init__(
        self,
        assembler: ChunkAssembler,
        client: PullClient,
        address: str,
        slot: int,
        on_bytes: Callable[[int], None],
        on_refused: Callable[[], None],
    ) -> None:
        self.address = address
        self.last_message_at = time.monotonic()
        self.last_kv_at = 0.0
        self.is_done = False
        self._connection = slot
        self._slot: StagedChunk | None = None
        """Memory of the message that is arriving."""
        self._assembler = assembler
        self._client = client
        self._on_bytes = on_bytes
        self._on_refused = on_refused
        self._num_refused = 0
        self._has_ended = False
        self._head = b""
        self._checksum = Checksum(b"")
        self._buffer: ByteArray = np.empty(0, np.uint8)
        self._message = self._buffer
        self._in_place: tuple[ChunkHeader, list[memoryview]] | None = None

    @property
    def job(self) -> FetchJob:
        """Returns what it shall bring."""
        return self._assembler.job

    @property
    def transport(self) -> int:
        """Returns the one over which it comes."""
        return self._assembler.transport

    @property
    def peer_rank(self) -> int:
        """Returns the rank of the peer that it reads from."""
        return self.job.source.peer_rank

    @property
    def chunk_bytes(self) -> int | None:
        """Returns the sender's setting; None before it has sent it."""
        return self._assembler.chunk_bytes

    def num_tokens_complete(self, chunk_bytes: int | None) -> int:
        """Returns what `ChunkAssembler` has, when all copies are done; nothing if they do not
        count."""
        try:
            self.check()
        except PeerLost:
            return self.job.meta.first_token
        return self._assembler.num_tokens_complete(chunk_bytes)

    def check(self) -> None:
        """Checks what was copied, once all is done. Raises `PeerLost` if it does not count."""
        try:
            self._assembler.check()
        except PeerLost as error:
            raise PeerLost(f"{self.address}: {error}") from error

    def close(self) -> None:
        """No copy of this stream is on its way."""
        self._assembler.close()

    async def run(self) -> None:
        """Raises a KVTransferError that says why the stream could not be completed; `NotServed`:
        before any of it came."""
        self._assembler.on_kv = self._kv_came
        try:
            missing = await self._receive([])
            if missing:
                missing = await self._receive(missing)
            if missing:
                raise CorruptChunk(f"{len(missing)} chunks arrived damaged twice")
        finally:
            self._assembler.stop()
        self.is_done = True

    async def _receive(self, repeat: list[int]) -> list[int]:
        """Makes one call. Returns chunks that are missing after it."""
        self.last_message_at = time.monotonic()
        self._num_refused = 0
        self._has_ended = False
        try:
            await self._client.pull(self.address, self._connection, self._request(repeat), self)
        finally:
            self._give_back()
        await self._assembler.arrived()
        missing = self._assembler.missing
        if not self._has_ended or missing is None:
            raise PeerLost(f"the stream from {self.address} stopped before its end")
        return missing

    # As a `MessageSink` -----------------------------------------------------------------------

    def begin(self, head: bytes, num_bytes: int) -> list[memoryview]:
        """Blocks of ours if it can be, or memory from which the chunk is copied at its `end`.
        Raises `CorruptChunk` for more than can be meant, before any memory is taken."""
        self.last_message_at = time.monotonic()
        if num_bytes > self._assembler.most_bytes:
            raise CorruptChunk(f"{self.address} announced {num_bytes} bytes in one message")
        self._head = head
        self._checksum = Checksum(head)
        self._in_place = self._place(num_bytes)
        if self._in_place is not None:
            return self._in_place[1]
        self._message = self._memory_for(num_bytes)
        self._message[: len(head)] = np.frombuffer(head, np.uint8)
        return [self._message[len(head) :].data] if num_bytes > len(head) else []

    def fill(self, part: memoryview) -> None:
        """Takes a piece of a message's payload, which only messages with KV have. Any thread may
        call it."""
        self.last_message_at = self.last_kv_at = time.monotonic()
        self._checksum.extend(part)

    def _memory_for(self, num_bytes: int) -> ByteArray:
        self._give_back()
        self._slot = self._assembler.memory_for(num_bytes)
        if self._slot is not None:
            return self._slot.buffer
        if num_bytes > len(self._buffer):
            self._buffer = np.empty(num_bytes, np.uint8)
        return self._buffer[:num_bytes]

    def _give_back(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._assembler.give_back(slot)

    def end(self) -> None:
        self.last_message_at = time.monotonic()
        try:
            if self._in_place is None:
                self._accept(self._message)
            else:
                self._accept_in_place(*self._in_place)
        except CorruptChunk:
            self._on_refused()
            self._num_refused += 1
            if self._num_refused > _MAX_REFUSED:
                raise
        finally:
            self._give_back()

    def _place(self, num_bytes: int) -> tuple[ChunkHeader, list[memoryview]] | None:
        try:
            header = decode_head(self._head, num_bytes)
            if header.kind is not ChunkKind.DATA:
                return None
            views = self._assembler.place(header, num_bytes - len(self._head))
        except CorruptChunk:
            return None  # It is found again, and counted, when all of it is there.
        return (header, views) if views is not None else None

    def _accept_in_place(self, header: ChunkHeader, views: list[memoryview]) -> None:
        self._checksum.check()
        self._assembler.accept_in_place(header)
        self._on_bytes(sum(len(view) for view in views))

    def _accept(self, message: ByteArray) -> None:
        header = decode_head(self._head, len(message))
        self._checksum.check()
        chunk = Chunk(header, message[HEADER.size :])
        if chunk.header.kind in (ChunkKind.DATA, ChunkKind.BLOCKS, ChunkKind.WINDOW):
            num_bytes = self._assembler.accept(chunk)
            if num_bytes:
                self._on_bytes(num_bytes)
        elif chunk.header.kind is ChunkKind.END:
            self._assembler.end(chunk)
            self._has_ended = True
        elif chunk.payload.nbytes:
            raise CorruptChunk("a sign of life that carries bytes")
        else:
            self._assembler.check_on_the_way()

    def _kv_came(self, num_bytes: int) -> None:
        self.last_message_at = self.last_kv_at = time.monotonic()
        self._on_bytes(num_bytes)

    def _request(self, repeat: list[int]) -> pb.PullRequest:
        job, meta = self.job, self.job.meta
        return pb.PullRequest(
            transfer_id=meta.transfer_id,
            attempt=meta.attempt,
            epoch=meta.peer.epoch,
            stream_index=job.stream,
            num_streams=job.num_streams,
            rank=job.source.rank,
            tp_size=job.source.tp_size,
            first_token=meta.first_token,
            num_tokens=meta.num_tokens,
            repeat_chunks=repeat,
            transport=self._assembler.transport,
            first_layer=job.source.layers.start,
            stop_layer=job.source.layers.stop % ALL_LAYERS.stop,
        )
