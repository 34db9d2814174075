"""Puts arriving chunks of one stream where they belong, and knows which have arrived.

    1. `accept(chunk)`   every field is compared with what was asked for; then copies of its tokens
                         into our blocks are issued
    2. `end(chunk)`      the sender's last word
    3. `arrived`         what was accepted but is read beside the call is there: `missing` is what
                         has to come once more
    4. `stop`            no copy is issued any more
    5. `check`           all copies are done: do they count?
    6. `close`

A chunk that is foreign, late, twice, out of bounds or of another shape raises `CorruptChunk` and
changes nothing. Tokens that were not asked for are never written, even if their block was sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from kv_transfer.errors import CorruptChunk
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.staging import StagedChunk
from kv_transfer.transports.fetch_job import FetchJob
from kv_transfer.transports.group_target import GroupTarget
from kv_transfer.wire.chunk import HEADER, Chunk, ChunkHeader, shape_code
from kv_transfer.wire.chunk_grid import MAX_CHUNK_BYTES, ChunkGrid


def _nothing(num_bytes: int) -> None:
    return


class ChunkAssembler(ABC):
    """One stream of one transfer over one transport."""

    transport: int
    """As the pull names it."""

    def __init__(self, job: FetchJob, cache: KVCacheView) -> None:
        self.job = job
        self._cache = cache
        self._theirs = job.layout
        num_groups = len(job.source.share)
        self._targets = [GroupTarget(job, group, cache) for group in range(num_groups)]
        self._share_code = shape_code(*job.source.share)
        self.on_kv: Callable[[int], None] = _nothing
        """Is notified of bytes of KV that came beside the call, after their message was
        accepted."""
        self._chunk_bytes = 0
        self._grid: ChunkGrid | None = None
        self._missing: set[int] = set()

    # What transports do in their own way ------------------------------------------------------

    @abstractmethod
    def accept(self, chunk: Chunk) -> int:
        """Issues copies of the chunk's tokens into our blocks. Returns the bytes of KV in it; 0:
        they are read beside the call, and `on_kv` tells when. Raises `CorruptChunk` when it is not
        one that is missing."""

    def place(self, header: ChunkHeader, payload_bytes: int) -> list[memoryview] | None:
        """Returns blocks of ours into which a payload may be received before it can be checked;
        None: it has to be copied. The chunk is missing all the same until `accept_in_place`.
        Raises `CorruptChunk` as `accept` does."""
        return None

    def accept_in_place(self, header: ChunkHeader) -> None:
        """Counts what was written into what `place` gave, and was checked."""
        raise NotImplementedError

    def memory_for(self, num_bytes: int) -> StagedChunk | None:
        """Returns memory to receive a message in, to be given back; None: any will do."""
        return None

    def give_back(self, slot: StagedChunk) -> None:
        """The message in it was accepted, or is lost."""
        raise NotImplementedError

    def check_on_the_way(self) -> None:
        """Checks what is read beside the call. Raises `PeerLost` if it cannot come any more."""
        return

    async def arrived(self) -> None:
        """Waits until copies were issued of all that was accepted. Raises `PeerLost` if it does not
        come."""
        return

    def stop(self) -> None:
        """Issues no copy any more, and tells nothing of KV. Idempotent."""
        self.on_kv = _nothing

    def check(self) -> None:
        """Checks what was copied, once all is done. Raises `PeerLost` if it does not count."""
        return

    def close(self) -> None:
        """Gives back what was acquired; no copy is on its way."""
        return

    @property
    def most_bytes(self) -> int:
        """Returns the bytes of the longest message that this stream may bring."""
        largest = max(page.num_bytes for page in self.job.source.share)
        return HEADER.size + max(MAX_CHUNK_BYTES, largest)

    # What has arrived -------------------------------------------------------------------------

    @property
    def missing(self) -> list[int] | None:
        """Returns chunk indices that have not arrived; None before the sender has sent its grid."""
        return sorted(self._missing) if self._grid is not None else None

    @property
    def chunk_bytes(self) -> int | None:
        """Returns the sender's setting, from which its grid follows; None before it has sent it."""
        return self._chunk_bytes if self._grid is not None else None

    def num_tokens_complete(self, chunk_bytes: int | None) -> int:
        """Returns the leading tokens of the prompt after which a node may go on with what this
        stream carries: nothing of them is missing in any layer of any group, those that were not
        asked for among them. `chunk_bytes`: what other streams know of the sender's grid.

        Where a window keeps tokens from being sent, what it would need in the middle of the prompt
        is not there: then it is the whole prompt or nothing."""
        meta = self.job.meta
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

    def end(self, chunk: Chunk) -> None:
        """Raises `CorruptChunk` for the end of another stream."""
        self._check_identity(chunk.header)
        self._grid_of(chunk.header)

    @property
    def _is_cut_by_window(self) -> bool:
        """Returns whether tokens of any group that we lack are not sent."""
        first, stop = self.job.meta.first_token, self.job.meta.num_tokens
        groups = self._theirs.groups
        return any(group.tokens_to_pull(first, stop).start > first for group in groups)

    def _first_token_of(self, grid: ChunkGrid, index: int) -> int:
        place = grid.position(index)
        return grid.blocks_of(place).start * self._theirs.groups[place.group].block_size

    def _check_identity(self, header: ChunkHeader) -> None:
        meta = self.job.meta
        if (header.transfer_id, header.attempt) != (meta.transfer_id, meta.attempt):
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
        job, meta = self.job, self.job.meta
        self._chunk_bytes = chunk_bytes
        self._grid = ChunkGrid.of(self._theirs, chunk_bytes, meta.first_token, meta.num_tokens)
        stripe = self._grid.stripe_of(job.source.share, job.stream, job.num_streams, job.layers)
        self._missing = set(stripe)
