"""The tiers in which a block's KV may lie, from the quickest to the slowest, and messages about
those behind the cache: commands of the scheduler go to every transfer process, which does its
share and answers with an event.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Tier(StrEnum):
    """Names where a block is found by its hash."""

    GPU = "gpu"
    """In the cache that the model reads, wherever that is."""
    HOST = "host"
    DISK = "disk"
    STORE = "store"
    """A store that all nodes share, and that outlives them."""


class StoreMeta(msgspec.Struct, frozen=True, tag="store", array_like=True):
    """Either side: copy `blocks[i]` to slot `slots[i]` of the host tier, which then holds the block
    of hash `names[i]`. Answered by a HostTierEvent."""

    job: int
    blocks: list[int]
    slots: list[int]
    names: list[bytes]


class LoadTicket(msgspec.Struct, frozen=True, array_like=True):
    """Names a load whose layers can be waited for, as `kv_transfer.memory.load_marks` says. Numbers
    grow in the order in which loads begin."""

    place: int
    number: int


class LoadMeta(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """Either side: copy slot `slots[i]` of the host tier to `blocks[i]`, layer by layer. Answered
    by a HostTierEvent.

    `ticket`: mark each layer that is there, and say `LoadBegun` with the first. None: nothing waits
    for layers.
    """

    job: int
    blocks: list[int]
    slots: list[int]
    ticket: LoadTicket | None = None


class SpillMeta(msgspec.Struct, frozen=True, tag="spill", array_like=True):
    """Either side: write what `slots` of the host tier hold to the disk tier. Answered by a
    HostTierEvent."""

    job: int
    slots: list[int]


class FetchMeta(msgspec.Struct, frozen=True, tag="fetch", array_like=True):
    """Either side: read the block of hash `names[i]` from the disk tier, or the store, to slot
    `slots[i]` of the host tier. Answered by a HostTierEvent."""

    job: int
    names: list[bytes]
    slots: list[int]
    tier: Tier = Tier.DISK


class PutMeta(msgspec.Struct, frozen=True, tag="put", array_like=True):
    """Either side: give the store what `slots` of the host tier hold. Answered by a
    HostTierEvent."""

    job: int
    slots: list[int]


class AskMeta(msgspec.Struct, frozen=True, tag="ask", array_like=True):
    """Either side: which of these blocks has the store? Answered by a StoreFound. `is_chain`: those
    behind the first that it lacks are of no use, and not looked for."""

    job: int
    names: list[bytes]
    is_chain: bool = True


class ForgetMeta(msgspec.Struct, frozen=True, tag="forget", array_like=True):
    """Either side: remove these blocks from the disk tier; None: everything, from the host tier
    too. Not answered."""

    names: list[bytes] | None


TierJob = StoreMeta | LoadMeta | SpillMeta | FetchMeta | PutMeta


TierCommand = TierJob | ForgetMeta | AskMeta


class HostTierEvent(msgspec.Struct, frozen=True, tag="host_tier", array_like=True):
    """A transfer process has done its share of a job; nothing of it is on its way any more.

    Attributes:
        damaged: Slots of which nothing is to be used: checksums are wrong, or it failed.
    """

    job: int
    process: int
    damaged: list[int] = []


class StoreFound(msgspec.Struct, frozen=True, tag="store_found", array_like=True):
    """A transfer process says what the store has of its share of blocks that it was asked for:
    `found`, by their places among the names."""

    job: int
    process: int
    found: list[int]


class LoadBegun(msgspec.Struct, frozen=True, tag="load_begun", array_like=True):
    """A transfer process has loaded and marked the first of its layers."""

    job: int
    process: int


class TierContents(msgspec.Struct, frozen=True, tag="tier_contents", array_like=True):
    """A transfer process has started, and this is what its share of the tiers holds.

    Attributes:
        slots: Of the host tier: the hash of each block that outlived the process's former life.
        files: Of the disk tier, the same, those used longest ago first; `damaged_files`: others.
        off: Why a tier is off, by its name.
    """

    process: int
    generation: int
    slots: dict[int, bytes] = {}
    files: list[bytes] = []
    damaged_files: int = 0
    off: dict[Tier, str] = {}


class TierOff(msgspec.Struct, frozen=True, tag="tier_off", array_like=True):
    """A tier of a transfer process takes nothing any more, because of `reason`."""

    process: int
    tier: Tier
    reason: str


class DiskUnwritten(msgspec.Struct, frozen=True, tag="disk_unwritten", array_like=True):
    """A transfer process could not write to its disk, because of `reason`. What lies there can
    still be read, and the disk may be written again later."""

    process: int
    reason: str


TierEvent = HostTierEvent | LoadBegun | TierContents | TierOff | DiskUnwritten | StoreFound
