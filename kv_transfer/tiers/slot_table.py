"""Which block lies in which slot of host memory, in the order of use.

    free ── take ──▶ (being filled) ── put ──▶ stored ── displaced by `take`, or `forget` ──▶ free
                            └────────────────── give_back ────────────────────────────────────▲

A pinned slot is read or written by a job: it is not displaced, and is free only after `unpin`.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice


class SlotTable:
    """`num_slots` slots; `stored` gives a slot by hash, those displaced next in front."""

    def __init__(self, num_slots: int) -> None:
        self.stored: OrderedDict[bytes, int] = OrderedDict()
        self.pins: Counter[int] = Counter()
        self.num_displaced = 0
        self.residency_s = 0.0
        """Seconds that displaced blocks have been here, summed."""
        self._num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._since: dict[bytes, float] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_unused(self) -> int:
        """Returns how many slots are neither free nor hold a block: those that jobs fill."""
        return self._num_slots - len(self._free) - len(self.stored)

    @property
    def num_to_take(self) -> int:
        """Returns how many slots could be taken now, at least."""
        return len(self._free) + max(0, len(self.stored) - len(self.pins))

    def num_with_room(self, names: Sequence[bytes]) -> int:
        """Returns for how many of these blocks, from the first on, slots could be taken, beside
        those that are stored."""
        room = self.num_to_take - sum(name in self.stored for name in names)
        for count, name in enumerate(names):
            room -= name not in self.stored
            if room < 0:
                return count
        return len(names)

    def fill(self, stored: Mapping[int, bytes]) -> None:
        """Records what all slots hold, by slot, when nothing is known of any."""
        for slot, name in stored.items():
            self.put(name, slot)
        used = set(self.stored.values())
        self._free = [slot for slot in self._free if slot not in used]

    def use(self, name: bytes) -> None:
        self.stored.move_to_end(name)

    def take(self) -> int | None:
        """Returns a slot that may be written to; None: jobs use them all."""
        if self._free:
            return self._free.pop()
        for name, slot in self.stored.items():
            if slot not in self.pins:
                self.num_displaced += 1
                self.residency_s += time.monotonic() - self._since.pop(name)
                del self.stored[name]
                return slot
        return None

    def take_for(self, names: Sequence[bytes]) -> dict[bytes, int]:
        """Takes a slot for each of these that is not stored, and pins those of all of them. There
        must be room (`num_with_room`)."""
        self.pin(self.stored[name] for name in names if name in self.stored)
        fresh: dict[bytes, int] = {}
        for name in names:
            if name not in self.stored:
                slot = self.take()
                assert slot is not None, "room was counted"
                fresh[name] = slot
        self.pin(fresh.values())
        return fresh

    def next_to_go(self, count: int) -> list[tuple[bytes, int]]:
        """Returns those of the first `count` blocks that `take` would displace."""
        first = islice(self.stored.items(), count)
        return [(name, slot) for name, slot in first if slot not in self.pins]

    def put(self, name: bytes, slot: int) -> None:
        """Records that a slot which was taken holds this block now."""
        self.stored[name] = slot
        self._since[name] = time.monotonic()

    def give_back(self, slot: int) -> None:
        """Takes back a slot that holds nothing; it is free when nothing pins it."""
        if slot not in self.pins:
            self._free.append(slot)

    def forget(self, name: bytes) -> None:
        del self._since[name]
        self.give_back(self.stored.pop(name))

    def pin(self, slots: Iterable[int]) -> None:
        self.pins.update(slots)

    def unpin(self, name: bytes, slot: int, *, is_damaged: bool) -> None:
        """Ends the use of a slot by a job that took it for this block."""
        self.pins[slot] -= 1
        if self.pins[slot] == 0:
            del self.pins[slot]
        if self.stored.get(name) != slot:
            self.give_back(slot)
        elif is_damaged:
            self.forget(name)
