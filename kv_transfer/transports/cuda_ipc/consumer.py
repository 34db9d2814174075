"""The consumer's side of CUDA IPC: copies KV out of the caches of prefill nodes on this host.

1. `fetch`    the peer's cache is mapped, once for all transfers; one that cannot be mapped is no
              failure: its KV comes over another transport
2. messages   name blocks, as `in_place/names_assembler.py` has it
"""

from __future__ import annotations

import logging
from functools import lru_cache

import msgspec

from kv_transfer.errors import PeerLost
from kv_transfer.memory.cache_view import CacheMap, KVCacheView
from kv_transfer.transports.base import ConsumerTransport, TransportId
from kv_transfer.transports.chunk_assembler import ChunkAssembler
from kv_transfer.transports.cuda_ipc.advert import CacheAdvert
from kv_transfer.transports.cuda_ipc.local_frames import LocalAddress
from kv_transfer.transports.cuda_ipc.local_pull_client import LocalPullClient
from kv_transfer.transports.cuda_ipc.peer_caches import PeerCaches
from kv_transfer.transports.fetch_job import FetchJob
from kv_transfer.transports.in_place.names_assembler import NamesAssembler, PeerBlocks
from kv_transfer.transports.in_place.read_leases import LeaseName, ReadLeasesFile
from kv_transfer.wire.handshake import host_id
from kv_transfer.wire.pull_client import PullClient

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
        peer = MappedBlocks(mapped, self.peer_caches, advert.leases)
        return NamesAssembler(job, self._cache, self.id, peer)

    def close_idle(self, idle_s: float) -> None:
        self.peer_caches.close_idle(idle_s)

    def close(self) -> None:
        self.peer_caches.close()
        for caller in self._callers.values():
            caller.close_connections()

    def _drop_unused(self) -> None:
        """Unmaps caches of peers that have exited."""
        self._callers = {
            local: caller for local, caller in self._callers.items() if not caller.is_unused
        }


class MappedBlocks(PeerBlocks):
    """A peer's cache that is mapped into this process. `caches` is called when it is not needed any
    more."""

    def __init__(self, mapped: CacheMap, caches: PeerCaches, leases: ReadLeasesFile) -> None:
        self.places = mapped
        self._mapped = mapped
        self._caches = caches
        self._leases = leases

    def is_held(self, lease: LeaseName) -> bool:
        try:
            return self._leases.is_held(*lease)
        except OSError as error:
            raise PeerLost("the peer died while its blocks were copied") from error

    def release(self) -> None:
        self._caches.release(self._mapped)


@lru_cache(maxsize=64)
def _advert(advertised: bytes) -> CacheAdvert | None:
    """Returns None for what is no advert."""
    try:
        return msgspec.msgpack.decode(advertised, type=CacheAdvert)
    except msgspec.MsgspecError:
        return None
