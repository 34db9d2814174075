"""A producer describes its window to pullers that read it through NIXL."""

from __future__ import annotations

import msgspec


class NixlAdvert(msgspec.Struct, frozen=True, array_like=True):
    """Describes a producer's window and read leases.

    `agent`: what NIXL needs in order to reach the producer's agent, with the keys of the memory
    that it registered. The window begins at `address` of GPU `device`, of host memory if that is
    None, and has `num_slots` slots of `slot_bytes`. The words of the read leases begin at `leases`.
    `chunk_bytes`: the producer's setting, from which its grid follows.
    """

    agent: bytes
    address: int
    num_slots: int
    slot_bytes: int
    device: int | None
    leases: int
    chunk_bytes: int
