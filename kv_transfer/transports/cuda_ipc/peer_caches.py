"""Consumer: KV caches of prefill nodes on this host, mapped into this process.

1. `acquire`   maps a cache when it is first needed; the same mapping serves all transfers
2. `release`   when a transfer has ended and none of its copies is on its way
3. the process that owns the cache ends: nothing gets the mapping any more, and with its last user
   it goes; until then the memory would not be free, though its owner is dead
4. `close_idle`   nothing has used it for long: its node may have another role, and name now

A cache that cannot be mapped is no failure: its KV comes over the network.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass

from kv_transfer.base import KVCacheHandle
from kv_transfer.memory.cache_view import CacheMap
from kv_transfer.memory.devices.device import DeviceError, MemoryDevice
from kv_transfer.metadata import KVPeer

logger = logging.getLogger(__name__)

_Name = tuple[str, int, int]
"""Engine id, epoch, rank."""


@dataclass(slots=True)
class _Mapped:
    cache: CacheMap
    owner: int
    """pidfd of the process that has the memory."""
    num_users: int = 0
    used_at: float = 0.0


class PeerCaches:
    """`device` is the one that our own cache lies on."""

    def __init__(self, device: MemoryDevice) -> None:
        self._device = device
        self._mapped: dict[_Name, _Mapped] = {}
        self._orphans: dict[int, _Mapped] = {}
        """Given up, but still in use, by identity of the cache."""
        self._hopeless: set[_Name] = set()

    def __len__(self) -> int:
        return len(self._mapped) + len(self._orphans)

    def acquire(self, peer: KVPeer, handle: KVCacheHandle) -> CacheMap | None:
        """Returns a map to be given back by `release`. None: it cannot be mapped."""
        name = (peer.engine_id, peer.epoch, handle.rank)
        if name not in self._mapped and name not in self._hopeless:
            try:
                self._map(name, peer, handle)
            except (DeviceError, OSError, OverflowError, ValueError) as error:
                self._hopeless.add(name)
                logger.warning(
                    "the KV cache of rank %d of %s is on this host but cannot be mapped, so it "
                    "comes over the network: %s", handle.rank, peer.engine_id, error,
                )  # fmt: skip
        mapped = self._mapped.get(name)
        if mapped is None:
            return None
        mapped.num_users += 1
        mapped.used_at = time.monotonic()
        return mapped.cache

    def release(self, cache: CacheMap) -> None:
        for mapped in [*self._mapped.values(), *self._orphans.values()]:
            if mapped.cache is cache:
                mapped.num_users -= 1
                mapped.used_at = time.monotonic()
                self._close_orphan(mapped)
                return

    def close_idle(self, idle_s: float) -> None:
        horizon = time.monotonic() - idle_s
        for name, mapped in list(self._mapped.items()):
            if mapped.num_users == 0 and mapped.used_at < horizon:
                self._give_up(name)

    def close(self) -> None:
        """No copy may be on its way."""
        for name in list(self._mapped):
            self._give_up(name)
        for mapped in list(self._orphans.values()):
            mapped.num_users = 0
            self._close_orphan(mapped)

    def _map(self, name: _Name, peer: KVPeer, handle: KVCacheHandle) -> None:
        if not 0 <= handle.rank < peer.layout.num_ranks:
            raise ValueError(f"rank {handle.rank} of {peer.layout.num_ranks} ranks cannot be")
        owner = os.pidfd_open(handle.pid)
        try:
            cache = CacheMap(handle, peer.layout.of_rank(handle.rank), self._device)
        except BaseException:
            os.close(owner)
            raise
        self._mapped[name] = _Mapped(cache, owner)
        asyncio.get_running_loop().add_reader(owner, self._give_up, name)

    def _give_up(self, name: _Name) -> None:
        """Gives the mapping away no more."""
        mapped = self._mapped.pop(name)
        asyncio.get_running_loop().remove_reader(mapped.owner)
        os.close(mapped.owner)
        self._orphans[id(mapped.cache)] = mapped
        self._close_orphan(mapped)

    def _close_orphan(self, mapped: _Mapped) -> None:
        if mapped.num_users == 0 and self._orphans.pop(id(mapped.cache), None) is not None:
            mapped.cache.close()
