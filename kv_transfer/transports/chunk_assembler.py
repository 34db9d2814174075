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

from dataclasses import dataclass

import numpy as np

from kv_transfer.errors import CorruptChunk
from kv_transfer.layout import PageShape
from kv_transfer.memory.block_views import BlockViews
from kv_transfer.memory.cache_view import CacheMap, KVCacheView
from kv_transfer.memory.copy_stream import Numbers
from kv_transfer.memory.inbox import Inbox
from kv_transfer.metadata import RecvMeta
from kv_transfer.transports.group_target import GroupTarget, NamedBlocks
from kv_transfer.wire.chunk import HEADER, ByteArray, Chunk, ChunkHeader, ChunkKind, shape_code
from kv_transfer.wire.chunk_grid import MAX_CHUNK_BYTES, ChunkGrid, ChunkPlace, GroupGrid

_WORD_BYTES = 4
_NUM_FIRST_WORDS = 3


@dataclass(frozen=True, slots=True)
class PullSource:
    """One rank of the peer, and what our `rank` of `tp_size` takes from it.

    Attributes:
        peer_rank: The rank that is asked.
        share: By group, see `KVLayout.share`.
    """

    rank: int
    tp_size: int
    peer_rank: int
    share: tuple[PageShape, ...]


class ChunkAssembler:
    """One stream of one transfer. `views` are those of our cache, where chunks may be received in
    place."""

    def __init__(
        self,
        meta: RecvMeta,
        source: PullSource,
        cache: KVCacheView,
        stream: int,
        num_streams: int,
        views: BlockViews | None = None,
    ) -> None:
        self.source = source
        self.stream = stream
        self.num_streams = num_streams
        self.peer_cache: CacheMap | None = None
        """The sender's cache, where it is mapped: then chunks may be blocks of it."""
        self.hold: tuple[int, int] | None = None
        """Slot and number, if they were: what was copied counts only while they are held."""
        self._meta = meta
        self._theirs = meta.peer.layout
        self._cache = cache
        self._targets = [
            GroupTarget(meta, group, share, cache) for group, share in enumerate(source.share)
        ]
        self._share_code = shape_code(*source.share)
        self._views = views
        self._chunk_bytes = 0
        self._grid: ChunkGrid | None = None
        self._missing: set[int] = set()

    @property
    def inbox(self) -> Inbox:
        """Where a message may be received from which chunks are copied."""
        return self._cache.inbox

    @property
    def block_bytes(self) -> int:
        """Bytes of the smallest block that this stream carries. No message with KV is shorter."""
        return min(share.num_bytes for share in self.source.share if share.num_bytes)

    @property
    def most_bytes(self) -> int:
        """Bytes of the longest message that this stream may bring."""
        payload = max(MAX_CHUNK_BYTES, *(share.num_bytes for share in self.source.share))
        if self.peer_cache is not None:
            blocks = self._theirs.num_blocks_for(self._meta.num_tokens)
            layers = [len(group.layers) for group in self._theirs.groups]
            num_named = sum((1 + num) * count for num, count in zip(layers, blocks, strict=True))
            payload = max(payload, _WORD_BYTES * (_NUM_FIRST_WORDS + num_named))
        return HEADER.size + payload

    @property
    def may_place(self) -> bool:
        """Whether any message may be received in place."""
        return self._views is not None

    @property
    def missing(self) -> list[int] | None:
        """Chunk indices that have not arrived; None before the sender has told its grid."""
        return sorted(self._missing) if self._grid is not None else None

    @property
    def chunk_bytes(self) -> int | None:
        """The sender's setting, from which its grid follows; None before it has told."""
        return self._chunk_bytes if self._grid is not None else None

    def num_tokens_complete(self, chunk_bytes: int | None) -> int:
        """Returns the leading tokens of the prompt after which a node may go on with what this
        stream carries: nothing of them is missing in any layer of any group, those that were not
        asked for among them. `chunk_bytes`: what other streams know of the sender's grid.

        Where a window keeps tokens from being sent, what it would need in the middle of the prompt
        is not there: then it is the whole prompt or nothing."""
        meta = self._meta
        if self._grid is None and chunk_bytes is not None:
            self._learn_grid(chunk_bytes)
        grid = self._grid
        if grid is None:
            return meta.first_token
        if not self._missing:
            return meta.num_tokens
        if self._is_cut_by_window:
            return meta.first_token
        return max(meta.first_token, min(self._first_token_of(grid, i) for i in self._missing))

    def accept(self, chunk: Chunk) -> int:
        """Issues copies of the chunk's tokens into our blocks. Returns the bytes of KV in it.
        Raises `CorruptChunk` when it is not one that is missing."""
        header = chunk.header
        if header.kind is ChunkKind.BLOCKS:
            return self._accept_named(chunk)
        index = self._missing_index(header)
        self._check_size(header, chunk.payload.nbytes)
        target = self._targets[header.group]
        target.copy_payload(header, chunk.payload)
        self._missing.discard(index)
        return header.num_blocks * target.share.num_bytes

    def place(self, header: ChunkHeader, payload_bytes: int) -> list[memoryview] | None:
        """Returns blocks of ours into which a payload may be received; None: it has to be copied.
        The chunk is missing all the same until `accept_in_place`. Raises `CorruptChunk` as
        `accept` does."""
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
        """What `place` gave is written, and was checked."""
        index = self._index_of(header)
        self._missing.discard(index)

    def end(self, chunk: Chunk) -> None:
        """Raises `CorruptChunk` for the end of another stream."""
        self._check_identity(chunk.header)
        self._grid_of(chunk.header)

    @property
    def _is_cut_by_window(self) -> bool:
        """Whether tokens of any group that we lack are not sent."""
        first, stop = self._meta.first_token, self._meta.num_tokens
        groups = self._theirs.groups
        return any(group.tokens_to_pull(first, stop).start > first for group in groups)

    def _first_token_of(self, grid: ChunkGrid, index: int) -> int:
        place = grid.position(index)
        return grid.blocks_of(place).start * self._theirs.groups[place.group].block_size

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

    def _check_identity(self, header: ChunkHeader) -> None:
        if (header.transfer_id, header.attempt) != (self._meta.transfer_id, self._meta.attempt):
            raise CorruptChunk("the chunk belongs to another transfer or attempt")

    def _grid_of(self, header: ChunkHeader) -> ChunkGrid:
        if self._grid is None:
            if header.chunk_bytes < 1:
                raise CorruptChunk("the chunk names no grid")
            self._learn_grid(header.chunk_bytes)
        assert self._grid is not None
        if self._chunk_bytes != header.chunk_bytes:
            raise CorruptChunk("the chunk belongs to another grid than its predecessors")
        return self._grid

    def _learn_grid(self, chunk_bytes: int) -> None:
        meta = self._meta
        self._chunk_bytes = chunk_bytes
        self._grid = ChunkGrid.of(self._theirs, chunk_bytes, meta.first_token, meta.num_tokens)
        self._missing = set(self._grid.stripe_of(self.source.share, self.stream, self.num_streams))

    def _index_of(self, header: ChunkHeader) -> int:
        """The grid position. The first span may hold blocks before those that we asked for."""
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

    def _accept_named(self, message: Chunk) -> int:
        """Chunks that lie in blocks of the peer; their bytes. All of them or none."""
        peer = self.peer_cache
        if peer is None:
            raise CorruptChunk("the peer names blocks of a cache that is not mapped here")
        self._check_identity(message.header)
        if message.header.shape != self._share_code:
            raise CorruptChunk("the peer names blocks of another shape than was asked for")
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
        num_bytes = 0
        for group, blocks in _named_blocks(grid, indices, table):
            self._targets[group].copy_from_cache(blocks, peer)
            num_bytes += len(blocks.places) * self._targets[group].share.num_bytes
        self._missing -= chunks
        self.hold = hold
        return num_bytes


def _names(payload: ByteArray) -> tuple[tuple[int, int], Numbers, Numbers]:
    """Returns what a message of kind BLOCKS says: the hold, the chunks, and blocks of the spans
    that occur in them. Raises `CorruptChunk`."""
    if payload.nbytes < 12 or payload.nbytes % 4 != 0:
        raise CorruptChunk("a message that names blocks is cut off")
    words = payload.view("<u4").astype(np.int64)
    slot, number, num_chunks = words[:3].tolist()
    if not 0 < num_chunks < len(words) - 2:
        raise CorruptChunk("a message that names blocks is cut off")
    return (slot, number), words[3 : 3 + num_chunks], words[3 + num_chunks :]


def _named_blocks(
    grid: ChunkGrid, indices: Numbers, table: Numbers
) -> list[tuple[int, NamedBlocks]]:
    """Returns every block of these chunks, by group. The table has the blocks of one span after
    the other, group by group. Raises `CorruptChunk` unless it has as many as the chunks."""
    found: list[tuple[int, NamedBlocks]] = []
    start = used = 0
    for number, group in enumerate(grid.groups):
        inside = indices[(indices >= start) & (indices < start + group.num_chunks)] - start
        start += group.num_chunks
        if len(inside):
            blocks, num_used = _named_in_group(group, inside, table[used:])
            found.append((number, blocks))
            used += num_used
    if used != len(table):
        raise CorruptChunk("a message names more blocks than its chunks have")
    return found


def _named_in_group(grid: GroupGrid, indices: Numbers, table: Numbers) -> tuple[NamedBlocks, int]:
    """Returns every block of these chunks, which count from the group's first, and how many
    entries of the table they are."""
    layers, spans = np.divmod(indices, grid.num_spans)
    occurring = sorted(set(spans.tolist()))
    blocks = [grid.blocks_of(span) for span in occurring]
    numbers = np.array([number for some in blocks for number in some])
    if len(table) < len(numbers):
        raise CorruptChunk("a message names fewer blocks than its chunks have")
    counts = np.array([len(some) for some in blocks])
    place = np.searchsorted(occurring, spans)
    begin, size = (np.cumsum(counts) - counts)[place], counts[place]
    # A chunk's blocks lie one behind the other, in the table and in what is returned.
    at = np.repeat(begin - (np.cumsum(size) - size), size) + np.arange(size.sum())
    return NamedBlocks(np.repeat(layers, size), numbers[at], table[at]), len(numbers)
