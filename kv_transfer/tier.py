"""The tiers in which a block's KV may lie, from the quickest to the slowest."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Tier(StrEnum):
    """Names where a block is found by its hash."""

    GPU = "gpu"
    """In the cache that the model reads, wherever that is."""
    HOST = "host"
    DISK = "disk"


class LoadTimes(msgspec.Struct, frozen=True, array_like=True):
    """When one transfer process did what for a load from host memory, in CLOCK_MONOTONIC
    seconds, which all processes of a host share.

    Attributes:
        received: The command reached the process.
        begun: Loads before it were through, and its first copies were issued.
        first: Its first layer was copied and compared, and marked.
        compared: All checksums were.
        ended: All layers were copied, compared and marked.
    """

    received: float
    begun: float
    first: float
    compared: float
    ended: float
