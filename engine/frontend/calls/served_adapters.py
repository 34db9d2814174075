"""Holds the adapters that requests may name on a node, and which names have changed lately.

A node may serve thousands, and many routers follow what it serves: each gets the changes alone,
as long as they are known from where it is on.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict
from itertools import takewhile

from engine.contracts.request_spec import AdapterRef

_MAX_CHANGES = 1024
"""Names whose changes are known; a watcher that needs an older one gets all adapters."""


class ServedAdapters(UserDict[str, AdapterRef]):
    """Holds adapters by their names. Each change has a number, the first one 1."""

    def __init__(self) -> None:
        self.num_changes = 0
        self._num_forgotten = 0
        self._num_names: Counter[str] = Counter()
        """Counts names by what they stand for."""
        self._changes: OrderedDict[str, int] = OrderedDict()
        """Has the newest change of each name, the newest of all at the end."""
        super().__init__()

    def __setitem__(self, name: str, ref: AdapterRef) -> None:
        if name in self:
            self._drop(self[name].digest)
        super().__setitem__(name, ref)
        self._num_names[ref.digest] += 1
        self._note(name)

    def __delitem__(self, name: str) -> None:
        self._drop(self[name].digest)
        super().__delitem__(name)
        self._note(name)

    def has(self, digest: str) -> bool:
        """Returns whether any name stands for an adapter."""
        return self._num_names[digest] > 0

    def since(self, number: int) -> list[tuple[str, AdapterRef | None]] | None:
        """Returns the names that have changed after the first `number` changes, each with what it
        stands for now; None: some of them are forgotten, or `number` is negative."""
        if number < self._num_forgotten:
            return None
        new = takewhile(lambda one: one[1] > number, reversed(self._changes.items()))
        return [(name, self.get(name)) for name, _ in new]

    def _drop(self, digest: str) -> None:
        self._num_names[digest] -= 1
        if not self._num_names[digest]:
            del self._num_names[digest]

    def _note(self, name: str) -> None:
        self.num_changes += 1
        self._changes.pop(name, None)
        self._changes[name] = self.num_changes
        if len(self._changes) > _MAX_CHANGES:
            _, self._num_forgotten = self._changes.popitem(last=False)
