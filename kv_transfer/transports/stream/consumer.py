"""Chunks whose KV comes in the messages themselves.

`place(header)` gives the blocks into which a payload may be received before it can be checked, and
`accept_in_place` counts it once it was. One that then turns out to be damaged may have changed
blocks, but only such as are missing.
"""

from __future__ import annotations

from kv_transfer.errors import CorruptChunk
from kv_transfer.memory.block_views import BlockViews
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.staging import StagedChunk
from kv_transfer.transports.base import ConsumerTransport, TransportId
from kv_transfer.transports.chunk_assembler import ChunkAssembler
from kv_transfer.transports.fetch_job import FetchJob
from kv_transfer.wire.chunk import Chunk, ChunkHeader, ChunkKind
from kv_transfer.wire.chunk_grid import ChunkPlace

_IN_PLACE_BYTES = 16 << 10
"""Blocks from this size on are received in place; smaller ones are sooner copied."""


class StreamConsumer(ConsumerTransport):
    """Works with every peer."""

    id = TransportId.STREAM

    def __init__(self, cache: KVCacheView) -> None:
        super().__init__(cache)
        is_worth_it = cache.device.copies_at_once and cache.page_bytes >= _IN_PLACE_BYTES
        self._views = BlockViews(cache) if is_worth_it else None

    def fetch(self, job: FetchJob, advertised: bytes) -> ChunkAssembler:
        return StreamAssembler(job, self._cache, self._views)


class StreamAssembler(ChunkAssembler):
    """`views` are those of our cache, where chunks may be received in place."""

    transport = TransportId.STREAM

    def __init__(self, job: FetchJob, cache: KVCacheView, views: BlockViews | None = None) -> None:
        super().__init__(job, cache)
        self._views = views
        self._block_bytes = min(share.num_bytes for share in job.source.share if share.num_bytes)
        """The smallest block that this stream carries. No message with KV is shorter."""

    def accept(self, chunk: Chunk) -> int:
        header = chunk.header
        if header.kind is not ChunkKind.DATA:
            raise CorruptChunk(f"a message of kind {header.kind.name} where KV was asked for")
        index = self._missing_index(header)
        self._check_size(header, chunk.payload.nbytes)
        target = self._targets[header.group]
        target.copy_payload(header, chunk.payload)
        self._missing.discard(index)
        return header.num_blocks * target.share.num_bytes

    def memory_for(self, num_bytes: int) -> StagedChunk | None:
        """Returns pinned memory for KV, if there is any free; whatever else comes is not copied."""
        return self._cache.inbox.reserve(num_bytes) if num_bytes > self._block_bytes else None

    def give_back(self, slot: StagedChunk) -> None:
        self._cache.inbox.give_back(slot)

    def place(self, header: ChunkHeader, payload_bytes: int) -> list[memoryview] | None:
        if self._views is None:
            return None
        told = self._chunk_bytes, self._grid, self._missing
        try:
            self._missing_index(header)
        finally:
            # What is not checked yet must not tell us the grid.
            self._chunk_bytes, self._grid, self._missing = told
        self._check_size(header, payload_bytes)
        return self._targets[header.group].views(header, self._views)

    def accept_in_place(self, header: ChunkHeader) -> None:
        index = self._index_of(header)
        self._missing.discard(index)

    def _missing_index(self, header: ChunkHeader) -> int:
        self._check_identity(header)
        if header.group >= len(self._targets):
            raise CorruptChunk(f"there is no group {header.group}")
        if header.shape != self._targets[header.group].shape_code:
            raise CorruptChunk("the chunk has another shape than was asked for")
        index = self._index_of(header)
        if index not in self._missing:
            raise CorruptChunk(f"chunk {index} is not expected here, or came twice")
        return index

    def _index_of(self, header: ChunkHeader) -> int:
        """Returns the grid position. The first span may hold blocks before those that we asked
        for."""
        grid = self._grid_of(header)
        group = grid.groups[header.group]
        span = header.first_block // group.blocks_per_chunk
        if header.layer >= group.num_layers or span >= group.num_spans:
            raise CorruptChunk("the chunk lies outside of the prompt")
        wanted = group.blocks_of(span)
        if header.first_block > wanted.start or (
            header.first_block + header.num_blocks != wanted.stop
        ):
            raise CorruptChunk("the chunk does not fill its place in the grid")
        return grid.index(ChunkPlace(header.group, header.layer, span))

    def _check_size(self, header: ChunkHeader, payload_bytes: int) -> None:
        expected = header.num_blocks * self._targets[header.group].share.num_bytes
        if payload_bytes != expected:
            raise CorruptChunk(f"{payload_bytes} bytes of KV where {expected} belong")
