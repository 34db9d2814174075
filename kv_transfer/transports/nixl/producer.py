"""The producer's side of NIXL: KV is copied into a window, and pullers anywhere read it there.

1. start         window and read leases are registered; if NIXL does not start, it says so once,
                 and nothing is advertised
2. `advertise`   every puller gets what its agent needs
3. exports       fill slots for the pulls that are there, as `nixl/window_export.py` has it
4. `run`         lets UCX answer, and learns what was read. RDMA devices answer alone; over TCP,
                 reads wait for this loop
5. `close`       the window goes once no copy into it is on its way
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import msgspec

from kv_transfer.config import KVTransferConfig
from kv_transfer.layout import KVLayout
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.devices.device import DeviceError
from kv_transfer.transports.base import Export, ExportOwner, ProducerTransport, TransportId
from kv_transfer.transports.in_place.read_leases import ReadLeases
from kv_transfer.transports.nixl.advert import NixlAdvert
from kv_transfer.transports.nixl.agent import NixlError
from kv_transfer.transports.nixl.filled_slots import FilledSlots
from kv_transfer.transports.nixl.window import Window, open_window
from kv_transfer.transports.nixl.window_export import WindowExport
from kv_transfer.transports.nixl.window_message import read_notice
from kv_transfer.wire.chunk_grid import longest_chunk

_CALLS_AT_ONCE = 16
_LOOKS_IN_A_ROW = 200
"""A slot of a window is mostly read before this many looks. After them, others get the
processor."""
_BUSY_PAUSE_S = 0.0002
_IDLE_PAUSE_S = 0.005
"""A peer's first request may have to wait this long."""

logger = logging.getLogger(__name__)


class NixlProducer(ProducerTransport):
    """Fills a window with what pullers want of `cache`."""

    id = TransportId.NIXL

    def __init__(
        self,
        config: KVTransferConfig,
        layout: KVLayout,
        cache: KVCacheView,
        owner: ExportOwner,
    ) -> None:
        self._owner = owner
        self._cache = cache
        self._chunk_bytes = config.chunk_bytes
        self._patience_s = config.stall_timeout_s
        self.filled: FilledSlots | None = None
        self._advert = b""
        longest = longest_chunk(layout, config.chunk_bytes)
        leases = ReadLeases()
        try:
            window = open_window(config, cache.device, longest)
            window.agent.register(leases.address, leases.num_bytes, None)
        except (NixlError, DeviceError) as error:
            logger.warning("KV does not leave through NIXL: %s", error)
            return
        self.filled = FilledSlots(window, leases, cache)
        self._advert = _advert(window, leases, config.chunk_bytes)

    def advertise(self, puller_host: str) -> bytes | None:
        return self._advert if self.filled is not None else None

    def open(self, export: Export) -> WindowExport:
        return WindowExport(export, self.filled, self._owner, self._chunk_bytes)

    async def run(self) -> None:
        if self.filled is None:
            return
        looks = 0
        while True:
            looks = 0 if self._look(self.filled) else looks + 1
            self.filled.tick(self._patience_s)
            if not self.filled.num_unread:
                await self._rest(self.filled)
            else:
                await asyncio.sleep(0 if looks < _LOOKS_IN_A_ROW else _BUSY_PAUSE_S)

    async def close(self) -> None:
        if self.filled is not None:
            self._cache.copies.then(self.filled.window.close)

    def _look(self, filled: FilledSlots) -> bool:
        """Returns whether any slot was read."""
        calls = _CALLS_AT_ONCE if filled.num_unread else 1
        notices = [notice for _ in range(calls) for notice in filled.window.agent.notices()]
        return sum(filled.was_read(read_notice(notice)) for notice in notices) > 0

    async def _rest(self, filled: FilledSlots) -> None:
        """Waits a moment, or until a slot is filled."""
        filled.is_filled.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_PAUSE_S):
                await filled.is_filled.wait()


def _advert(window: Window, leases: ReadLeases, chunk_bytes: int) -> bytes:
    """Returns what pullers have to know, once all is registered."""
    advert = NixlAdvert(
        window.agent.metadata,
        window.address,
        window.slots.num_slots,
        window.slot_bytes,
        window.device,
        leases.address,
        chunk_bytes,
    )
    return msgspec.msgpack.encode(advert)
