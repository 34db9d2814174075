"""Holds the adapters of a node: there may be thousands, mostly the same on all nodes of a model.

Sets that are equal are one object here, whichever node reports them. So what asks all nodes (has it
changed? which names are there?) reads each set once, and not once for each node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import NamedTuple
from weakref import WeakValueDictionary


class AdapterId(NamedTuple):
    """An adapter by the name that clients use, and by what it is."""

    name: str
    digest: str


class AdapterSet(frozenset[AdapterId]):
    """Is made by `adapter_set`."""

    @cached_property
    def digests(self) -> frozenset[str]:
        return frozenset(one.digest for one in self)

    @cached_property
    def by_name(self) -> Mapping[str, AdapterId]:
        return {one.name: one for one in self}

    def with_changes(self, changes: Iterable[AdapterId]) -> AdapterSet:
        """Returns what it is once these names stand for these digests; without one, for nothing."""
        changed = {one.name: one for one in changes}
        if not changed:
            return self
        before = self.by_name
        replaced = {before[name] for name in changed if name in before}
        added = {one for one in changed.values() if one.digest}
        # Copies of sets and dicts do not hash again what is in them.
        new = adapter_set((self - replaced) | added)
        if "by_name" not in new.__dict__:
            by_name = {**before, **changed}
            for name in changed.keys() - {one.name for one in added}:
                del by_name[name]
            new.by_name = by_name
        return new


_SETS: WeakValueDictionary[int, AdapterSet] = WeakValueDictionary()
"""Holds those that some report has, by their hash."""


def adapter_set(adapters: Iterable[AdapterId]) -> AdapterSet:
    """Returns the set of these."""
    new = AdapterSet(adapters)
    known = _SETS.get(hash(new))
    if known is not None and known == new:
        return known
    _SETS[hash(new)] = new
    return new


NO_ADAPTERS = adapter_set(())
