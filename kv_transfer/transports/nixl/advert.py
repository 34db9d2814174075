"""A producer describes its cache to pullers that read it through NIXL."""

from __future__ import annotations

import msgspec


class NixlAdvert(msgspec.Struct, frozen=True, array_like=True):
    """Describes a producer's cache and read leases.

    `agent`: what NIXL needs in order to reach the producer's agent, with the keys of the memory
    that it registered. `rank` and `num_blocks` are those of the cache, which begins at `address` of
    GPU `device`; of host memory if that is None. The words of the read leases begin at `leases`.
    """

    agent: bytes
    rank: int
    num_blocks: int
    address: int
    device: int | None
    leases: int
