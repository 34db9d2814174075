"""Holds the adapters of a node: there may be thousands, mostly the same on all nodes of a model.

Sets that are equal are one object here, whichever node reports them. So what asks all nodes (has it
changed? which names are there?) reads each set once, and not once for each node.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    def names(self) -> frozenset[str]:
        return frozenset(one.name for one in self)


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
