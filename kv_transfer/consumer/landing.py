"""Where arriving chunks of one stream belong, and which of them have arrived.

    1. `accept(chunk)`   every field is compared with what was asked for; then copies of its tokens
                         into our blocks are issued. It may name blocks of the sender's cache, where
                         that is mapped here: then many chunks at once, all of them or none
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

from kv_transfer.errors import CorruptChunk
from kv_transfer.layout import HeadRange, KVLayout
from kv_transfer.memory.block_views import BlockViews
from kv_transfer.memory.cache_view import BlockShape, CacheMap, KVCacheView, TokenRun, token_runs
from kv_transfer.memory.copy_stream import Numbers
from kv_transfer.memory.inbox import Inbox
from kv_transfer.metadata import RecvMeta
from kv_transfer.wire.chunk import ByteArray, Chunk, ChunkHeader, ChunkKind
from kv_transfer.wire.chunk_grid import ChunkGrid


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of the sender, one entry for each."""

    layers: Numbers
    numbers: Numbers
    """From the start of the prompt."""
    addresses: Numbers
    """Where they can be read."""
    in_host: bool
    """They have come over the network."""

    def where(self, choice: npt.NDArray[np.bool_]) -> _Blocks:
        layers, numbers, addresses = (
            self.layers[choice],
            self.numbers[choice],
            self.addresses[choice],
        )
        return _Blocks(layers, numbers, addresses, self.in_host)


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
        self.hold: tuple[int, int] | None = None
        """Slot and number, if they were: what was copied counts only while they are held."""
        self._meta = meta
        self._ours = ours
        self._theirs = meta.peer.layout
        self._cache = cache
        self._shape = BlockShape.of(self._theirs, heads)
        self._views = views if self._shape == cache.shape else None
        self._block_ids = np.array(meta.block_ids[0], np.int64)
        self._grid: ChunkGrid | None = None
        self._missing: set[int] = set()

    @property
    def inbox(self) -> Inbox:
        """Where a message may be received from which chunks are copied."""
        return self._cache.inbox

    @property
    def block_bytes(self) -> int:
        """Of the sender's, with the heads of this stream. No message with KV is shorter."""
        return self._shape.num_bytes

    @property
    def may_place(self) -> bool:
        """Whether any message may be received in place."""
        return self._views is not None

    @property
    def missing(self) -> list[int] | None:
        """Chunk indices that have not arrived; None before the sender has told its grid."""
        return sorted(self._missing) if self._grid is not None else None

    @property
    def blocks_per_chunk(self) -> int | None:
        """Of the sender's grid; None before it has told."""
        return self._grid.blocks_per_chunk if self._grid is not None else None

    def num_tokens_complete(self, blocks_per_chunk: int | None) -> int:
        """Leading tokens of the prompt of which nothing is missing that this stream carries, in any
        layer; those that were not asked for among them. `blocks_per_chunk`: what other streams of
        the sender know of its grid."""
        meta = self._meta
        if self._grid is None and blocks_per_chunk is not None:
            self._learn_grid(blocks_per_chunk)
        grid = self._grid
        if grid is None:
            return meta.first_token
        if not self._missing:
            return meta.num_tokens
        group = min(grid.position(index)[1] for index in self._missing)
        return max(
            meta.first_token, grid.blocks_of(group).start * self._theirs.groups[0].block_size
        )

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
        return self._views.of(header.layer, self._meta.block_ids[0][start:stop])

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
        if (header.dtype, header.block_size) != (
            self._theirs.groups[0].dtype,
            self._theirs.groups[0].block_size,
        ):
            raise CorruptChunk("the chunk has another dtype or block size than the peer said")

    def _check_heads(self, header: ChunkHeader) -> None:
        if HeadRange(header.head_start, header.num_heads) != self.heads:
            raise CorruptChunk("the chunk carries heads that were not asked for")

    def _grid_of(self, header: ChunkHeader) -> ChunkGrid:
        if self._grid is None:
            if header.blocks_per_chunk < 1:
                raise CorruptChunk("the chunk names no grid")
            self._learn_grid(header.blocks_per_chunk)
        assert self._grid is not None
        if self._grid.blocks_per_chunk != header.blocks_per_chunk:
            raise CorruptChunk("the chunk belongs to another grid than its predecessors")
        return self._grid

    def _learn_grid(self, blocks_per_chunk: int) -> None:
        self._grid = ChunkGrid(
            self._theirs.num_layers,
            self._theirs.groups[0].num_blocks_for(self._meta.num_tokens),
            blocks_per_chunk,
            self._meta.first_token // self._theirs.groups[0].block_size,
        )
        self._missing = set(self._grid.stripe(self.stream, self.num_streams))

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

    def _accept_named(self, message: Chunk) -> int:
        """Chunks that lie in blocks of the peer; their bytes. All of them or none."""
        peer = self.peer_cache
        if peer is None:
            raise CorruptChunk("the peer names blocks of a cache that is not mapped here")
        self._check_identity(message.header)
        self._check_heads(message.header)
        grid = self._grid_of(message.header)
        hold, indices, table = _names(message.payload)
        if self.hold not in (None, hold):
            raise CorruptChunk("blocks of two transfers are named in one stream")
        chunks = set(indices.tolist())
        if len(chunks) < len(indices) or not chunks <= self._missing:
            raise CorruptChunk("a chunk is named that is not expected here, or twice")
        try:
            peer.check_block_ids(table.tolist())
        except ValueError as error:
            raise CorruptChunk(f"the peer's {error}") from error
        layers, numbers, block_ids = _named_blocks(grid, indices, table)
        sources = peer.addresses_of(layers, block_ids)
        self._copy(_Blocks(layers, numbers, sources, in_host=False), peer.shape)
        self._missing -= chunks
        self.hold = hold
        return len(block_ids) * self._shape.num_bytes

    def _copy_from_payload(self, header: ChunkHeader, payload: ByteArray) -> None:
        """`payload` may go when this returns."""
        start, size = self._cache.inbox.lend(payload), self._shape.num_bytes
        place = np.arange(header.num_blocks)
        layers = np.full_like(place, header.layer)
        numbers, sources = header.first_block + place, start + size * place
        self._copy(_Blocks(layers, numbers, sources, in_host=True), self._shape)
        self._cache.inbox.copies_issued()

    def _copy(self, blocks: _Blocks, shape: BlockShape) -> None:
        """Tokens that were asked for, out of blocks that look like `shape`. Whole blocks that fill
        blocks of ours go together, in one call for all layers."""
        meta, size, whole = self._meta, shape.block_size, blocks
        if size != self._ours.groups[0].block_size:
            self._cache.write_runs(self.heads, shape, self._wanted_runs(blocks))
            return
        first = blocks.numbers * size
        is_whole = (first >= meta.first_token) & (first + size <= meta.num_tokens)
        if not is_whole.all():
            whole = blocks.where(is_whole)
            rest = self._wanted_runs(blocks.where(~is_whole))
            self._cache.write_runs(self.heads, shape, rest)
        targets = self._cache.addresses_of(whole.layers, self._block_ids[whole.numbers])
        self._cache.write_blocks(self.heads, targets, shape, whole.addresses, whole.in_host)

    def _is_whole(self, header: ChunkHeader) -> bool:
        """Whether all tokens of its blocks were asked for."""
        size = self._theirs.groups[0].block_size
        start, stop = header.first_block * size, (header.first_block + header.num_blocks) * size
        return self._meta.first_token <= start and stop <= self._meta.num_tokens

    def _wanted_runs(self, blocks: _Blocks) -> Iterator[tuple[int, TokenRun, int]]:
        """Tokens of these blocks that were asked for, as `KVCacheView.write_runs` takes them."""
        meta, size = self._meta, self._theirs.groups[0].block_size
        (block_ids,) = meta.block_ids
        columns = blocks.layers.tolist(), blocks.numbers.tolist(), blocks.addresses.tolist()
        for layer, number, source in zip(*columns, strict=True):
            start = max(number * size, meta.first_token)
            stop = min((number + 1) * size, meta.num_tokens)
            for run in token_runs(start, stop, size, self._ours.groups[0].block_size):
                yield (
                    source,
                    run,
                    self._cache.address_of(layer, block_ids[run.target_block]),
                )


def _names(payload: ByteArray) -> tuple[tuple[int, int], Numbers, Numbers]:
    """What a message of kind BLOCKS says: the hold, the chunks, and blocks of the groups that occur
    in them. Raises `CorruptChunk`."""
    if payload.nbytes < 12 or payload.nbytes % 4 != 0:
        raise CorruptChunk("a message that names blocks is cut off")
    words = payload.view("<u4").astype(np.int64)
    slot, number, num_chunks = words[:3].tolist()
    if not 0 < num_chunks < len(words) - 2:
        raise CorruptChunk("a message that names blocks is cut off")
    return (slot, number), words[3 : 3 + num_chunks], words[3 + num_chunks :]


def _named_blocks(
    grid: ChunkGrid, indices: Numbers, table: Numbers
) -> tuple[Numbers, Numbers, Numbers]:
    """Layer, number and physical block of every block of these chunks. Raises `CorruptChunk`."""
    layers, groups = np.divmod(indices, grid.num_groups)
    occurring = sorted(set(groups.tolist()))
    blocks = [grid.blocks_of(group) for group in occurring]
    numbers = np.array([number for some in blocks for number in some])
    if len(table) != len(numbers):
        raise CorruptChunk("a message names more blocks than its chunks have, or fewer")
    counts = np.array([len(some) for some in blocks])
    place = np.searchsorted(occurring, groups)
    begin, size = (np.cumsum(counts) - counts)[place], counts[place]
    # A chunk's blocks lie one behind the other, in the table and in what is returned.
    at = np.repeat(begin - (np.cumsum(size) - size), size) + np.arange(size.sum())
    return np.repeat(layers, size), numbers[at], table[at]
