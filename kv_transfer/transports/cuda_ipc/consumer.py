"""The consumer's side of CUDA IPC: copies KV out of the caches of prefill nodes on this host.

1. `fetch`    the peer's cache is mapped, once for all transfers; one that cannot be mapped is no
              failure: its KV comes over another transport
2. `accept`   a message names chunks, many at once: all of them are copied or none
3. `check`    what was copied counts only if the peer's read lease still lasts
"""

from __future__ import annotations

import logging
from functools import lru_cache

import msgspec
import numpy as np

from kv_transfer.errors import CorruptChunk, PeerLost
from kv_transfer.memory.cache_view import CacheMap, KVCacheView
from kv_transfer.memory.copy_stream import Numbers
from kv_transfer.transports.base import ConsumerTransport, TransportId
from kv_transfer.transports.chunk_assembler import ChunkAssembler
from kv_transfer.transports.cuda_ipc.advert import CacheAdvert
from kv_transfer.transports.cuda_ipc.local_frames import LocalAddress
from kv_transfer.transports.cuda_ipc.local_pull_client import LocalPullClient
from kv_transfer.transports.cuda_ipc.peer_caches import PeerCaches
from kv_transfer.transports.cuda_ipc.read_leases import ReadLeasesFile
from kv_transfer.transports.fetch_job import FetchJob
from kv_transfer.transports.group_target import NamedBlocks
from kv_transfer.wire.chunk import HEADER, ByteArray, Chunk, ChunkKind
from kv_transfer.wire.chunk_grid import ChunkGrid, GroupGrid
from kv_transfer.wire.handshake import host_id
from kv_transfer.wire.pull_client import PullClient

_WORD_BYTES = 4
_NUM_FIRST_WORDS = 3

logger = logging.getLogger(__name__)


class CudaIpcConsumer(ConsumerTransport):
    """Works with peers on this host whose cache lies in memory of the same kind as ours."""

    id = TransportId.CUDA_IPC
    is_one_stream_enough = True

    def __init__(self, cache: KVCacheView) -> None:
        super().__init__(cache)
        self.peer_caches = PeerCaches(cache.device)
        self._callers: dict[LocalAddress, LocalPullClient] = {}

    def caller(self, advertised: bytes, network: PullClient) -> PullClient:
        advert = _advert(advertised)
        if advert is None or advert.calls is None or not advert.calls.is_ours:
            return network
        if advert.calls not in self._callers:
            self._drop_unused()
            self._callers[advert.calls] = LocalPullClient(advert.calls, network)
        return self._callers[advert.calls]

    def fetch(self, job: FetchJob, advertised: bytes) -> ChunkAssembler | None:
        advert = _advert(advertised)
        if advert is None:
            logger.warning("%s described its cache wrongly", job.meta.peer.engine_id)
            return None
        is_gpu = self._cache.device.is_gpu
        if advert.host != host_id() or (advert.handle.cuda is not None) != is_gpu:
            return None
        mapped = self.peer_caches.acquire(job.meta.peer, advert.handle)
        if mapped is None:
            return None
        return NamesAssembler(job, self._cache, self.peer_caches, mapped, advert.leases)

    def close(self) -> None:
        self.peer_caches.close()
        for caller in self._callers.values():
            caller.close_connections()

    def _drop_unused(self) -> None:
        """Processes that have ended took their connections with them."""
        self._callers = {
            local: caller for local, caller in self._callers.items() if not caller.is_unused
        }


class NamesAssembler(ChunkAssembler):
    """Copies blocks that the sender names.

    `mapped`: the sender's cache, of which `caches` is told when it is not needed any more.
    """

    transport = TransportId.CUDA_IPC

    def __init__(
        self,
        job: FetchJob,
        cache: KVCacheView,
        caches: PeerCaches,
        mapped: CacheMap,
        leases: ReadLeasesFile,
    ) -> None:
        super().__init__(job, cache)
        self._caches = caches
        self._mapped: CacheMap | None = mapped
        self._leases = leases
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
        mapped = self._mapped
        if chunk.header.kind is not ChunkKind.BLOCKS or mapped is None:
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
            mapped.check_block_ids(table.tolist())
        except ValueError as error:
            raise CorruptChunk(f"the peer's {error}") from error
        num_bytes = 0
        for group, blocks in _named_blocks(grid, indices, table):
            self._targets[group].copy_from_cache(blocks, mapped)
            num_bytes += len(blocks.places) * self._targets[group].share.num_bytes
        self._missing -= chunks
        self._lease = lease
        return num_bytes

    def check(self) -> None:
        if self._lease is None:
            return
        try:
            is_held = self._leases.is_held(*self._lease)
        except OSError as error:
            raise PeerLost("the peer died while its blocks were copied") from error
        if not is_held:
            raise PeerLost("the peer let go of its blocks while they were copied")

    def close(self) -> None:
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            self._caches.release(mapped)


@lru_cache(maxsize=64)
def _advert(advertised: bytes) -> CacheAdvert | None:
    """Returns None for what is no advert."""
    try:
        return msgspec.msgpack.decode(advertised, type=CacheAdvert)
    except msgspec.MsgspecError:
        return None


def _names(payload: ByteArray) -> tuple[tuple[int, int], Numbers, Numbers]:
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
