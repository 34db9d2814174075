"""Copies blocks that a sender names out of its cache, which can be read from here.

1. `accept`   a message names chunks, many at once: all of them are copied or none
2. `check`    what was copied counts only if the sender's read lease still lasts
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from kv_transfer.errors import CorruptChunk, PeerLost
from kv_transfer.memory.cache_view import CachePlaces, KVCacheView
from kv_transfer.memory.devices.copy_stream import Numbers
from kv_transfer.transports.chunk_assembler import ChunkAssembler
from kv_transfer.transports.fetch_job import FetchJob
from kv_transfer.transports.group_target import NamedBlocks
from kv_transfer.transports.in_place.read_leases import LeaseName
from kv_transfer.wire.chunk import HEADER, ByteArray, Chunk, ChunkKind
from kv_transfer.wire.chunk_grid import ChunkGrid, GroupGrid

_WORD_BYTES = 4
_NUM_FIRST_WORDS = 3


class PeerBlocks(ABC):
    """The cache of one rank of a peer, as one stream of a transfer reads it.

    Attributes:
        places: Where its blocks lie, at addresses that our copies can read.
    """

    places: CachePlaces

    @abstractmethod
    def is_held(self, lease: LeaseName) -> bool:
        """Returns whether the lease outlasted all copies, which are done. Raises `PeerLost`."""

    @abstractmethod
    def release(self) -> None:
        """The stream has ended, and none of its copies is on its way."""


class NamesAssembler(ChunkAssembler):
    """Copies blocks that the sender names out of `peer`, over the transport with this id."""

    def __init__(self, job: FetchJob, cache: KVCacheView, transport: int, peer: PeerBlocks) -> None:
        super().__init__(job, cache)
        self.transport = transport
        self._peer: PeerBlocks | None = peer
        self._lease: tuple[int, int] | None = None
        """Slot and number, once blocks were named."""

    @property
    def most_bytes(self) -> int:
        blocks = self._theirs.num_blocks_for(self.job.meta.num_tokens)
        layers = [len(group.layers) for group in self._theirs.groups]
        num_named = sum((1 + num) * count for num, count in zip(layers, blocks, strict=True))
        names = HEADER.size + _WORD_BYTES * (_NUM_FIRST_WORDS + num_named)
        return max(super().most_bytes, names)

    def accept(self, chunk: Chunk) -> int:
        peer = self._peer
        if chunk.header.kind is not ChunkKind.BLOCKS or peer is None:
            raise CorruptChunk(f"a message of kind {chunk.header.kind.name} where names belong")
        self._check_identity(chunk.header)
        if chunk.header.shape != self._share_code:
            raise CorruptChunk("the peer names blocks of another shape than was asked for")
        grid = self._grid_of(chunk.header)
        lease, indices, table = _names(chunk.payload)
        if self._lease not in (None, lease):
            raise CorruptChunk("blocks of two transfers are named in one stream")
        chunks = set(indices.tolist())
        if len(chunks) < len(indices) or not chunks <= self._missing:
            raise CorruptChunk("a chunk is named that is not expected here, or twice")
        try:
            peer.places.check_block_ids(table.tolist())
        except ValueError as error:
            raise CorruptChunk(f"the peer's {error}") from error
        num_bytes = 0
        for group, blocks in _named_blocks(grid, indices, table):
            self._targets[group].copy_from_cache(blocks, peer.places)
            num_bytes += len(blocks.places) * self._targets[group].share.num_bytes
        self._missing -= chunks
        self._lease = lease
        return num_bytes

    def check(self) -> None:
        if self._lease is None or self._peer is None:
            return
        if not self._peer.is_held(self._lease):
            raise PeerLost("the peer let go of its blocks while they were copied")

    def close(self) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.release()


def _names(payload: ByteArray) -> tuple[LeaseName, Numbers, Numbers]:
    """Returns what a message of kind BLOCKS says: the read lease, the chunks, and blocks of the
    spans that occur in them. Raises `CorruptChunk`."""
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
