"""Leads names of adapters to what they stand for, at one moment.

Nodes may have thousands of adapters, and each report of one may change them. So nothing is made of
all names when something changes: a name is looked up in the sets of the nodes, and among the calls,
when it is asked for first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from edge.adapter_call import AdapterCall
from router.nodes.adapter_set import AdapterSet

Meaning = tuple[str, str]
"""Is an adapter's digest, and its model."""


class AdapterNames(Mapping[str, Meaning]):
    """Leads each name to its meaning, and never changes.

    Args:
        nodes: How many nodes of a model have a set of adapters.
        calls: The newest call about each name, by model. Of two models the later one counts.
    """

    def __init__(
        self,
        nodes: Mapping[tuple[AdapterSet, str], int],
        calls: Sequence[tuple[str, Mapping[str, AdapterCall]]] = (),
    ) -> None:
        self._nodes = [
            (adapters.by_name, model, num)
            for (adapters, model), num in sorted(nodes.items(), key=lambda one: -len(one[0][0]))
            if adapters
        ]
        self._calls = [(model, of_model) for model, of_model in reversed(calls) if of_model]
        self._found: dict[str, Meaning] = {}
        """Keeps what has been asked for, but no names that nothing has: clients invent them."""

    def __getitem__(self, name: str) -> Meaning:
        known = self._found.get(name)
        if known is not None:
            return known
        found = self._find(name)
        if found is None:
            raise KeyError(name)
        self._found[name] = found
        return found

    def __iter__(self) -> Iterator[str]:
        seen = set[str]()
        for names in (*(of_node for of_node, _, _ in self._nodes), *(c for _, c in self._calls)):
            for name in names:
                if name not in seen:
                    seen.add(name)
                    if name in self:
                        yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _find(self, name: str) -> Meaning | None:
        """Returns what calls have left: an adapter, of which requests wait where no node has it
        yet or now, or nothing where it was unloaded. A name keeps its old adapter until a node has
        the new one. Else what nodes say: while it stands for others here than there, all routers
        make the same of it, what most nodes say, or the smallest digest."""
        said = Counter[Meaning]()
        for adapters, model, num in self._nodes:
            one = adapters.get(name)
            if one is not None:
                said[one.digest, model] += num
        digests = {digest for digest, _ in said}
        for model, calls in self._calls:
            call = calls.get(name)
            if call is not None and (not call.digest or not digests or call.digest in digests):
                return (call.digest, model) if call.digest else None
        return min(said, key=lambda meaning: (-said[meaning], *meaning), default=None)
