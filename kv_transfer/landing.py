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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.block_views import BlockViews
from kv_transfer.cache_view import BlockShape, CacheMap, KVCacheView, TokenRun, token_runs
from kv_transfer.chunk_grid import ChunkGrid
from kv_transfer.errors import CorruptChunk
from kv_transfer.layout import HeadRange, KVLayout
from kv_transfer.memory.copy_stream import Numbers
from kv_transfer.memory.inbox import Inbox
from kv_transfer.metadata import RecvMeta
from kv_transfer.wire import ByteArray, Chunk, ChunkHeader, ChunkKind

_Place = tuple[int, int, int]
"""Layer, first block and number of blocks of a chunk."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of the sender, one entry for each."""

    layers: Numbers
    numbers: Numbers
    """From the start of the prompt."""
    addresses: Numbers
    """Where they can be read."""

    def where(self, choice: npt.NDArray[np.bool_]) -> _Blocks:
        return _Blocks(self.layers[choice], self.numbers[choice], self.addresses[choice])


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
        self._shape = BlockShape.of(self._theirs, heads)
        self._views = views if self._shape == cache.shape else None
        self._block_ids = np.array(meta.block_ids, np.int64)
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
            return self._accept_named(chunk)
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
        index = self._index_in(self._grid_of(header), *_place_of(header))
        self._missing.discard(index)

    def end(self, chunk: Chunk) -> None:
        """Raises `CorruptChunk` for the end of another stream."""
        self._check_identity(chunk.header)
        self._grid_of(chunk.header)

    def _missing_index(self, header: ChunkHeader) -> int:
        return self._missing_indices(header, [_place_of(header)]).pop()

    def _missing_indices(self, header: ChunkHeader, places: list[_Place]) -> set[int]:
        """Of the chunks that one message holds or names."""
        self._check_identity(header)
        self._check_heads(header)
        grid = self._grid_of(header)
        indices = {self._index_in(grid, *place) for place in places}
        if len(indices) < len(places) or not indices <= self._missing:
            foreign = sorted(indices - self._missing) or sorted(indices)
            raise CorruptChunk(f"chunk {foreign[0]} is not expected here, or came twice")
        return indices

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

    @staticmethod
    def _index_in(grid: ChunkGrid, layer: int, first_block: int, num_blocks: int) -> int:
        """The grid position. The first group may hold blocks before those that we asked for."""
        group = first_block // grid.blocks_per_chunk
        if layer >= grid.num_layers or group >= grid.num_groups:
            raise CorruptChunk("the chunk lies outside of the prompt")
        wanted = grid.blocks_of(group)
        if first_block > wanted.start or first_block + num_blocks != wanted.stop:
            raise CorruptChunk("the chunk does not fill its place in the grid")
        return grid.index(layer, group)

    def _check_size(self, header: ChunkHeader, payload_bytes: int) -> None:
        expected = header.num_blocks * self._shape.num_bytes
        if payload_bytes != expected:
            raise CorruptChunk(f"{payload_bytes} bytes of KV where {expected} belong")

    def _accept_named(self, message: Chunk) -> int:
        """Chunks that lie in blocks of the peer; their bytes. All of them or none."""
        peer = self.peer_cache
        if peer is None:
            raise CorruptChunk("the peer names blocks of a cache that is not mapped here")
        places, block_ids = _named_chunks(message)
        indices = self._missing_indices(message.header, places)
        try:
            peer.check_block_ids(block_ids.tolist())
        except ValueError as error:
            raise CorruptChunk(f"the peer's {error}") from error
        layers, numbers = _every_block(places)
        blocks = _Blocks(layers, numbers, peer.addresses_of(layers, block_ids))
        self._copy(blocks, peer.shape)
        self._missing -= indices
        return len(block_ids) * self._shape.num_bytes

    def _copy_from_payload(self, header: ChunkHeader, payload: ByteArray) -> None:
        """`payload` may go when this returns."""
        start, size = self._cache.inbox.lend(payload), self._shape.num_bytes
        layers, numbers = _every_block([_place_of(header)])
        self._copy(_Blocks(layers, numbers, start + size * np.arange(len(layers))), self._shape)
        self._cache.inbox.copies_issued()

    def _copy(self, blocks: _Blocks, shape: BlockShape) -> None:
        """Tokens that were asked for, out of blocks that look like `shape`. Whole blocks that fill
        blocks of ours go together, in one call for all layers."""
        meta, size = self._meta, shape.block_size
        if size == self._ours.block_size:
            first = blocks.numbers * size
            is_whole = (first >= meta.first_token) & (first + size <= meta.num_tokens)
            whole, blocks = blocks.where(is_whole), blocks.where(~is_whole)
            targets = self._cache.addresses_of(whole.layers, self._block_ids[whole.numbers])
            self._cache.write_blocks(self.heads, targets, shape, whole.addresses)
        self._cache.write_runs(self.heads, shape, self._wanted_runs(blocks))

    def _is_whole(self, header: ChunkHeader) -> bool:
        """Whether all tokens of its blocks were asked for."""
        size = self._theirs.block_size
        start, stop = header.first_block * size, (header.first_block + header.num_blocks) * size
        return self._meta.first_token <= start and stop <= self._meta.num_tokens

    def _wanted_runs(self, blocks: _Blocks) -> Iterator[tuple[int, TokenRun, int]]:
        """Tokens of these blocks that were asked for, as `KVCacheView.write_runs` takes them."""
        meta, size = self._meta, self._theirs.block_size
        columns = blocks.layers.tolist(), blocks.numbers.tolist(), blocks.addresses.tolist()
        for layer, number, source in zip(*columns, strict=True):
            start = max(number * size, meta.first_token)
            stop = min((number + 1) * size, meta.num_tokens)
            for run in token_runs(start, stop, size, self._ours.block_size):
                yield source, run, self._cache.address_of(layer, meta.block_ids[run.target_block])


def _place_of(header: ChunkHeader) -> _Place:
    return header.layer, header.first_block, header.num_blocks


def _every_block(places: list[_Place]) -> tuple[Numbers, Numbers]:
    """Layer and number of each block, in order."""
    layers, first, counts = np.array(places, np.int64).T
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(layers, counts), np.repeat(first, counts) + within


def _named_chunks(message: Chunk) -> tuple[list[_Place], Numbers]:
    """What a message of kind BLOCKS names: the chunks, and the sender's physical blocks of all, in
    order. Raises `CorruptChunk`."""
    if message.payload.nbytes == 0 or message.payload.nbytes % 4 != 0:
        raise CorruptChunk("a message that names blocks is cut off")
    words = message.payload.view("<u4").astype(np.int64)
    is_id = np.ones(len(words), np.bool_)
    places = []
    at = 0
    while at < len(words):
        layer, first_block, num_blocks = (*words[at : at + 3].tolist(), 0, 0)[:3]
        places.append((layer, first_block, num_blocks))
        is_id[at : at + 3] = False
        at += 3 + num_blocks
        if num_blocks == 0 or at > len(words):
            raise CorruptChunk("a message that names blocks is cut off")
    return places, words[is_id]
