"""A producer describes its cache, so that a puller on the same host can read it itself."""

from __future__ import annotations

import msgspec

from kv_transfer.base import KVCacheHandle
from kv_transfer.transports.cuda_ipc.local_frames import LocalAddress
from kv_transfer.transports.in_place.read_leases import ReadLeasesFile


class CacheAdvert(msgspec.Struct, frozen=True, array_like=True):
    """Describes a producer's cache.

    `host`: as `host_id` has it; a peer elsewhere can make no use of the rest. `calls`: where pulls
    can be asked for without a network in between, if anywhere.
    """

    host: str
    handle: KVCacheHandle
    leases: ReadLeasesFile
    calls: LocalAddress | None = None
