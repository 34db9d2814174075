"""Consumer: one PullKV call, repeated once if chunks arrived damaged.

1. the call is made; messages arrive, in any order of chunks
2. each is checked and written by the stream's `Landing`; damaged ones are counted and dropped
3. END; if chunks are missing, a second call asks for exactly those
4. still missing: `CorruptChunk`
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kv_transfer.cache_view import CacheMap
from kv_transfer.errors import CorruptChunk, PeerLost
from kv_transfer.landing import Landing
from kv_transfer.metadata import RecvMeta
from kv_transfer.pull_transport import PullTransport
from kv_transfer.wire import ByteArray, ChunkKind, decode_chunk
from tandem_pb import kv_transfer_pb2 as pb

_MAX_REFUSED = 16
"""Damaged chunks of one call. More than that is not an accident of the link."""


class PullStream:
    """`last_heard_at`: when the peer last said anything. `on_bytes` is told of every payload."""

    def __init__(
        self,
        meta: RecvMeta,
        landing: Landing,
        address: str,
        slot: int,
        num_pullers: int,
        on_bytes: Callable[[int], None],
        on_refused: Callable[[], None],
    ) -> None:
        self.address = address
        self.last_heard_at = time.monotonic()
        self.is_done = False
        self._slot = slot
        self._meta = meta
        self._landing = landing
        self._num_pullers = num_pullers
        self._on_bytes = on_bytes
        self._on_refused = on_refused
        self._num_refused = 0
        self._has_ended = False

    @property
    def peer_cache(self) -> CacheMap | None:
        """Where chunks may be copied from without the network."""
        return self._landing.peer_cache

    def use_peer_cache(self, cache: CacheMap) -> None:
        """Before `run`."""
        self._landing.peer_cache = cache

    async def run(self, transport: PullTransport) -> None:
        """Raises a KVTransferError that says why the stream could not be completed."""
        missing = await self._receive(transport, [])
        if missing:
            missing = await self._receive(transport, missing)
        if missing:
            raise CorruptChunk(f"{len(missing)} chunks arrived damaged twice")
        self.is_done = True

    async def _receive(self, transport: PullTransport, repeat: list[int]) -> list[int]:
        """One call. Chunks that are missing after it."""
        self.last_heard_at = time.monotonic()
        self._num_refused = 0
        self._has_ended = False
        await transport.pull(self.address, self._slot, self._request(repeat), self._take)
        missing = self._landing.missing
        if not self._has_ended or missing is None:
            raise PeerLost(f"the stream from {self.address} stopped before its end")
        return missing

    def _take(self, message: ByteArray) -> None:
        self.last_heard_at = time.monotonic()
        try:
            self._land(message)
        except CorruptChunk:
            self._on_refused()
            self._num_refused += 1
            if self._num_refused > _MAX_REFUSED:
                raise

    def _land(self, message: ByteArray) -> None:
        chunk = decode_chunk(message)
        if chunk.header.kind in (ChunkKind.DATA, ChunkKind.BLOCKS):
            self._on_bytes(self._landing.accept(chunk))
        elif chunk.header.kind is ChunkKind.END:
            self._landing.end(chunk)
            self._has_ended = True

    def _request(self, repeat: list[int]) -> pb.PullRequest:
        return pb.PullRequest(
            transfer_id=self._meta.transfer_id,
            attempt=self._meta.attempt,
            epoch=self._meta.peer.epoch,
            stream_index=self._landing.stream,
            num_streams=self._landing.num_streams,
            head_start=self._landing.heads.start,
            head_count=self._landing.heads.count,
            first_token=self._meta.first_token,
            num_tokens=self._meta.num_tokens,
            num_pullers=self._num_pullers,
            repeat_chunks=repeat,
            direct=self._landing.peer_cache is not None,
        )
