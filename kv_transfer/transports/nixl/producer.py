"""The producer's side of NIXL: pullers anywhere are told where blocks lie, and read them there.

1. start         cache and read leases are registered; if NIXL does not start, it says so once,
                 and nothing is advertised
2. `advertise`   every puller gets what its agent needs
3. exports       name their blocks, as `named/named_export.py` has it
4. `run`         lets UCX answer. RDMA devices answer alone; over TCP, reads wait for this loop
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from kv_transfer.config import KVTransferConfig
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.transports.base import ExportOwner, TransportId
from kv_transfer.transports.named.named_export import NamingProducer
from kv_transfer.transports.nixl.advert import NixlAdvert
from kv_transfer.transports.nixl.agent import NixlAgent, NixlError, registered_agent

_CALLS_IN_A_ROW = 16
_BUSY_PAUSE_S = 0.0002
_IDLE_PAUSE_S = 0.005
"""So long a peer's first question may have to wait."""

logger = logging.getLogger(__name__)


class NixlProducer(NamingProducer):
    """Opens `cache` of `rank` to whoever was told the keys."""

    id = TransportId.NIXL

    def __init__(
        self, config: KVTransferConfig, rank: int, cache: KVCacheView, owner: ExportOwner
    ) -> None:
        super().__init__(config.chunk_bytes, owner)
        self._agent: NixlAgent | None = None
        self._advert = b""
        try:
            agent = registered_agent(config.hosts, cache)
            agent.register(self.leases.address, self.leases.num_bytes, None)
        except NixlError as error:
            logger.warning("KV does not leave through NIXL: %s", error)
            return
        self._agent = agent
        advert = NixlAdvert(
            agent.metadata,
            rank,
            cache.num_blocks,
            cache.address,
            cache.device.number,
            self.leases.address,
        )
        self._advert = msgspec.msgpack.encode(advert)

    def advertise(self, puller_host: str) -> bytes | None:
        return self._advert if self._agent is not None else None

    async def run(self) -> None:
        if self._agent is None:
            return
        while True:
            is_busy = self.leases.num_held > 0
            for _ in range(_CALLS_IN_A_ROW if is_busy else 1):
                self._agent.progress()
            await asyncio.sleep(_BUSY_PAUSE_S if is_busy else _IDLE_PAUSE_S)
