"""Where arriving chunks of one stream belong, and which of them have arrived.

    1. `accept(chunk)`   every field is compared with what was asked for; then copies of its tokens
                         into our blocks are issued
       `place(header)`   or: the blocks into which it may be received before it can be checked;
                         `accept_in_place` when it was
    2. `end(chunk)`      the sender's last word: `missing` is what has to come once more

A chunk that is foreign, late, twice, out of bounds or of another shape raises `CorruptChunk` and
changes nothing. One that is received in place and then turns out to be damaged may have changed
blocks, but only such as are missing. Tokens that were not asked for are never written, even if
their block was sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kv_transfer.block_views import BlockViews
from kv_transfer.cache_view import BlockShape, CacheMap, KVCacheView, TokenRun, token_runs
from kv_transfer.chunk_grid import ChunkGrid
from kv_transfer.errors import CorruptChunk
from kv_transfer.layout import HeadRange, KVLayout
from kv_transfer.memory.inbox import Inbox
from kv_transfer.metadata import RecvMeta
from kv_transfer.wire import ByteArray, Chunk, ChunkHeader, ChunkKind


class Landing:
    """One stream of one transfer. `heads` are those that it carries; `views` of our cache, where
    chunks may be received in place."""

    def __init__(
        self,
        meta: RecvMeta,
        ours: KVLayout,
        cache: KVCacheView,
        heads: HeadRange,
        stream: int,
        num_streams: int,
        views: BlockViews | None = None,
    ) -> None:
        self.stream = stream
        self.num_streams = num_streams
        self.heads = heads
        self.peer_cache: CacheMap | None = None
        """The sender's cache, where it is mapped: then chunks may be blocks of it."""
        self._meta = meta
        self._ours = ours
        self._theirs = meta.peer.layout
        self._cache = cache
        self._shape = BlockShape.of(self._theirs, heads.count)
        self._views = views if self._shape == cache.shape and heads == cache.heads else None
        self._grid: ChunkGrid | None = None
        self._missing: set[int] = set()

    @property
    def inbox(self) -> Inbox:
        """Where a message may be received from which chunks are copied."""
        return self._cache.inbox

    @property
    def missing(self) -> list[int] | None:
        """Chunk indices that have not arrived; None before the sender has told its grid."""
        return sorted(self._missing) if self._grid is not None else None

    def accept(self, chunk: Chunk) -> int:
        """Issues copies of the chunk's tokens into our blocks; bytes of KV in it. Raises
        `CorruptChunk` when it is not one that is missing."""
        header = chunk.header
        if header.kind is ChunkKind.BLOCKS:
            return sum(self._accept_named(*named) for named in _named_chunks(chunk))
        index = self._missing_index(header)
        self._check_size(header, chunk.payload.nbytes)
        self._copy_from_payload(header, chunk.payload)
        self._missing.discard(index)
        return header.num_blocks * self._shape.num_bytes

    def place(self, header: ChunkHeader, payload_bytes: int) -> list[memoryview] | None:
        """Blocks of ours into which a payload may be received. The chunk is missing all the same
        until `accept_in_place`. None: it has to be copied. Raises `CorruptChunk` as `accept`
        does."""
        if self._views is None:
            return None
        grid, missing = self._grid, self._missing
        try:
            self._missing_index(header)
        finally:
            # What is not checked yet must not tell us the grid.
            self._grid, self._missing = grid, missing
        self._check_size(header, payload_bytes)
        if not self._is_whole(header):
            return None
        start, stop = header.first_block, header.first_block + header.num_blocks
        return self._views.of(header.layer, self._meta.block_ids[start:stop])

    def accept_in_place(self, header: ChunkHeader) -> None:
        """What `place` gave is written, and was checked."""
        index = self._index_of(header)
        self._missing.discard(index)

    def end(self, chunk: Chunk) -> None:
        """Raises `CorruptChunk` for the end of another stream."""
        self._check_identity(chunk.header)
        self._grid_of(chunk.header)

    def _missing_index(self, header: ChunkHeader) -> int:
        self._check_identity(header)
        self._check_heads(header)
        index = self._index_of(header)
        if index not in self._missing:
            raise CorruptChunk(f"chunk {index} is not expected here, or came twice")
        return index

    def _check_identity(self, header: ChunkHeader) -> None:
        if (header.transfer_id, header.attempt) != (self._meta.transfer_id, self._meta.attempt):
            raise CorruptChunk("the chunk belongs to another transfer or attempt")
        if (header.dtype, header.block_size) != (self._theirs.dtype, self._theirs.block_size):
            raise CorruptChunk("the chunk has another dtype or block size than the peer said")

    def _check_heads(self, header: ChunkHeader) -> None:
        if HeadRange(header.head_start, header.num_heads) != self.heads:
            raise CorruptChunk("the chunk carries heads that were not asked for")

    def _grid_of(self, header: ChunkHeader) -> ChunkGrid:
        if self._grid is None:
            if header.blocks_per_chunk < 1:
                raise CorruptChunk("the chunk names no grid")
            self._grid = ChunkGrid(
                self._theirs.num_layers,
                self._theirs.num_blocks_for(self._meta.num_tokens),
                header.blocks_per_chunk,
                self._meta.first_token // self._theirs.block_size,
            )
            self._missing = set(self._grid.stripe(self.stream, self.num_streams))
        if self._grid.blocks_per_chunk != header.blocks_per_chunk:
            raise CorruptChunk("the chunk belongs to another grid than its predecessors")
        return self._grid

    def _index_of(self, header: ChunkHeader) -> int:
        """The grid position. The first group may hold blocks before those that we asked for."""
        grid = self._grid_of(header)
        group = header.first_block // grid.blocks_per_chunk
        if header.layer >= grid.num_layers or group >= grid.num_groups:
            raise CorruptChunk("the chunk lies outside of the prompt")
        wanted = grid.blocks_of(group)
        if header.first_block > wanted.start or (
            header.first_block + header.num_blocks != wanted.stop
        ):
            raise CorruptChunk("the chunk does not fill its place in the grid")
        return grid.index(header.layer, group)

    def _check_size(self, header: ChunkHeader, payload_bytes: int) -> None:
        expected = header.num_blocks * self._shape.num_bytes
        if payload_bytes != expected:
            raise CorruptChunk(f"{payload_bytes} bytes of KV where {expected} belong")

    def _accept_named(self, header: ChunkHeader, block_ids: list[int]) -> int:
        """A chunk that lies in these blocks of the peer; its bytes."""
        peer = self.peer_cache
        if peer is None:
            raise CorruptChunk("the peer names blocks of a cache that is not mapped here")
        index = self._missing_index(header)
        try:
            peer.check_block_ids(block_ids)
        except ValueError as error:
            raise CorruptChunk(f"the peer's {error}") from error
        sources = peer.addresses_of(header.layer, block_ids)
        self._copy(header, sources, peer.shape, self.heads.start - peer.heads.start)
        self._missing.discard(index)
        return header.num_blocks * self._shape.num_bytes

    def _copy_from_payload(self, header: ChunkHeader, payload: ByteArray) -> None:
        """`payload` may go when this returns."""
        start, size = self._cache.inbox.lend(payload), self._shape.num_bytes
        sources = [start + i * size for i in range(header.num_blocks)]
        self._copy(header, sources, self._shape, 0)
        self._cache.inbox.copies_issued()

    def _copy(
        self, header: ChunkHeader, sources: list[int], shape: BlockShape, first_head: int
    ) -> None:
        """`sources`: addresses of the chunk's blocks, which look like `shape`."""
        block_ids = self._meta.block_ids
        if (
            shape == self._cache.shape
            and self.heads == self._cache.heads
            and self._is_whole(header)
        ):
            stop = header.first_block + header.num_blocks
            self._cache.write_blocks(header.layer, block_ids[header.first_block : stop], sources)
            return
        runs = (
            (sources[run.source_block - header.first_block], run, block_ids[run.target_block])
            for run in self._wanted_runs(header)
        )
        self._cache.write_runs(header.layer, self.heads, shape, first_head, runs)

    def _is_whole(self, header: ChunkHeader) -> bool:
        """Whether all tokens of its blocks were asked for."""
        size = self._theirs.block_size
        start, stop = header.first_block * size, (header.first_block + header.num_blocks) * size
        return self._meta.first_token <= start and stop <= self._meta.num_tokens

    def _wanted_runs(self, header: ChunkHeader) -> Iterator[TokenRun]:
        """Tokens of the chunk that were asked for."""
        size = self._theirs.block_size
        start = max(header.first_block * size, self._meta.first_token)
        stop = min((header.first_block + header.num_blocks) * size, self._meta.num_tokens)
        return token_runs(start, stop, size, self._ours.block_size)


def _named_chunks(message: Chunk) -> Iterator[tuple[ChunkHeader, list[int]]]:
    """What a message of kind BLOCKS names: each chunk as if it had come alone, and its blocks.
    Raises `CorruptChunk`."""
    if message.payload.nbytes % 4 != 0:
        raise CorruptChunk("a message that names blocks is cut off")
    words: list[int] = message.payload.view("<u4").tolist()
    at = 0
    while at < len(words):
        layer, first_block, num_blocks = (*words[at : at + 3], 0, 0)[:3]
        start, at = at + 3, at + 3 + num_blocks
        if num_blocks == 0 or at > len(words):
            raise CorruptChunk("a message that names blocks is cut off")
        header = replace(
            message.header, layer=layer, first_block=first_block, num_blocks=num_blocks
        )
        yield header, words[start:at]
