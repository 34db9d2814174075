"""Remembers the calls that changed a node's adapters, so that other nodes can follow them.

    1. nothing     a name is as the settings have it, or not there
    2. loaded      a call gave the name an adapter
    3. unloaded    a call took it away; remembered too, or a node that was away would bring it back

Each call has a version, and only a newer one changes what is known: whichever node reports calls,
in whatever order and how often, all nodes end alike. Versions are milliseconds since 1970 or, if a
clock is late, one more than the last: a router that has just started makes newer ones as well.
"""

from __future__ import annotations

from itertools import count, takewhile

from edge.adapter_call import AdapterCall, version_after

_MAX_UNLOADED = 1024
"""Unloaded names that are remembered; the oldest are forgotten."""
_MAX_TOLD_BYTES = 256 << 10
"""Bounds the calls of one report: some two thousand with names of usual lengths. A router that
starts asks a node to follow what it has learnt of others, and not yet of that one."""
_CALL_BYTES = 96
"""It has a digest and a version besides names."""


class AdapterRecords:
    """Holds the newest call about each name."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[int, AdapterCall]] = {}
        """Keeps them by name, the oldest note first, each with its number."""
        self._numbers = count(1)

    def of(self, name: str) -> AdapterCall | None:
        """Returns the newest call about a name, if there was any."""
        known = self._records.get(name)
        return None if known is None else known[1]

    def is_newer(self, version: int, digest: str, name: str) -> bool:
        """Returns whether a call is newer than what is known of the name."""
        known = self.of(name)
        return known is None or (version, digest) > known.order

    def next_version(self, name: str) -> int:
        """Returns a version for a call that is made here."""
        return version_after(self.of(name))

    def note(self, record: AdapterCall) -> None:
        """Notes a call that was followed."""
        self._records.pop(record.name, None)
        self._records[record.name] = next(self._numbers), record
        if not record.digest:
            unloaded = [name for name, (_, one) in self._records.items() if not one.digest]
            for name in unloaded[:-_MAX_UNLOADED]:
                del self._records[name]

    def since(self, number: int) -> tuple[list[AdapterCall], int]:
        """Returns records noted after `number`, the oldest first and not too many at once, and the
        number of the last of them. 0: from the first."""
        newest_first = takewhile(lambda noted: noted[0] > number, reversed(self._records.values()))
        told: list[AdapterCall] = []
        num_bytes = 0
        for at, one in reversed(list(newest_first)):
            num_bytes += _CALL_BYTES + len(one.name) + len(one.path) + len(one.model)
            if told and num_bytes > _MAX_TOLD_BYTES:
                break
            told.append(one)
            number = at
        return told, number
