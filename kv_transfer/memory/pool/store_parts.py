"""Cuts blocks into the values that a store keeps of them, so that nodes share them which are built
in unlike ways.

    a block of a rank   layer 0 | layer 1 | layer 2 | ... | layer 9
    values              stripe 0: layers 0, 8    stripe 1: layers 1, 9    stripe 2: layer 2 ...

Stripes are eight whatever the number of transfer processes is, as long as that divides eight: a
process has whole stripes then. A value is named by the heads that it has, not by the rank that has
them. So nodes share blocks whatever `--kv-processes` they have; latents, of which every rank has
all, whatever the number of ranks is, and each is kept once; and heads where as many ranks share
them. Heads one by one would suit unlike numbers of ranks, too, at eight times as many values of an
eighth of the size, each of which costs a store a look-up and the network a request.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from kv_transfer.layout import KVLayout
from kv_transfer.memory.pool.block_header import BlockHeaders
from kv_transfer.memory.pool.slot_memory import SlotMemory

_STRIPES = 8


@dataclass(frozen=True, slots=True)
class StorePart:
    """A stripe of the blocks of one rank.

    Attributes:
        prefix: What its keys begin with.
        places: Where its pages are among those of a slot.
        headers: Write and read what stands before its pages.
    """

    prefix: str
    places: tuple[int, ...]
    headers: BlockHeaders

    def key(self, name: bytes) -> str:
        return f"{self.prefix}/{name.hex()}"


def store_parts(
    layout: KVLayout, rank: int, first_layer: int, share: tuple[int, int], memory: SlotMemory
) -> list[StorePart]:
    """Returns the stripes of a process that has every `count`-th layer from `index` on, by
    `share`: index, count."""
    index, count = share
    stripes = _STRIPES if _STRIPES % count == 0 else count
    found = []
    for stripe in range(index, stripes, count):
        places = tuple(
            place
            for place in range(memory.num_layers)
            if (index + place * count) % stripes == stripe
        )
        if places:
            identity = _identity(layout, rank, first_layer, (stripe, stripes))
            headers = BlockHeaders(identity, len(places))
            found.append(StorePart(f"tandem/{identity.hex()[:32]}", places, headers))
    return found


def _identity(layout: KVLayout, rank: int, first_layer: int, stripe: tuple[int, int]) -> bytes:
    """Returns 32 bytes that are equal exactly for values that mean the same: model, data types,
    planes, tokens of a block, layers, heads and bytes of a page, whatever the number of ranks."""
    pages = [layout.page(group, rank) for group in range(len(layout.groups))]
    of_all = msgspec.structs.replace(layout, tp_size=1)
    meaning = (of_all, first_layer, layout.page_bytes, [page.heads for page in pages], stripe)
    return hashlib.sha256(msgspec.json.encode(meaning)).digest()
