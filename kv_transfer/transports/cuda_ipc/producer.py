"""The producer's side of CUDA IPC: pullers of this host get the addresses of blocks.

1. `advertise`   a puller with our `host_id` gets the handle of the cache, and where it can call
                 without a network in between
2. exports       name their blocks, as `in_place/named_export.py` has it
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from edge.h2.rpc_method import RpcMethod
from kv_transfer.config import KVTransferConfig
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.transports.base import ExportOwner, TransportId
from kv_transfer.transports.cuda_ipc.advert import CacheAdvert
from kv_transfer.transports.cuda_ipc.local_pull_server import LocalPullServer
from kv_transfer.transports.in_place.named_export import NamingProducer
from kv_transfer.wire.handshake import host_id
from kv_transfer.wire.service_paths import PULL_PATH

logger = logging.getLogger(__name__)


class CudaIpcProducer(NamingProducer):
    """Names blocks of `cache`, which on CPU is a memory file."""

    id = TransportId.CUDA_IPC

    def __init__(self, config: KVTransferConfig, cache: KVCacheView, owner: ExportOwner) -> None:
        super().__init__(config.chunk_bytes, owner)
        self._cache = cache
        self._calls: LocalPullServer | None = None

    def advertise(self, puller_host: str) -> bytes | None:
        if puller_host != host_id():
            return None
        calls = self._calls.address if self._calls is not None else None
        return msgspec.msgpack.encode(
            CacheAdvert(host_id(), self._cache.handle, self.leases.file, calls)
        )

    async def listen(self, methods: Mapping[str, RpcMethod]) -> None:
        server = LocalPullServer(methods[PULL_PATH])
        try:
            await server.listen()
        except OSError as error:
            logger.warning("pullers of this host must call over the network: %s", error)
            return
        self._calls = server

    async def close(self) -> None:
        if self._calls is not None:
            await self._calls.close()
