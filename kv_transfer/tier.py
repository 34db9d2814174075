"""The tiers in which a block's KV may lie, from the quickest to the slowest."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """Names where a block is found by its hash."""

    GPU = "gpu"
    """In the cache that the model reads, wherever that is."""
    HOST = "host"
    DISK = "disk"
