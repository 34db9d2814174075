"""Counts for something that may go, such as a node or a tenant. The counts go with it.

Prometheus' own counters keep every label they ever had, so a cluster that rolls for months, or a
key file that is edited, would fill the metrics with the dead.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

Owner = tuple[str, ...]

_PART_OWNERS = 50


class Tally(Collector):
    """Counts by owner. `labels` name the parts of an owner; `owners` are those that exist now.

    A family is collected in parts, so that a scrape of many owners can be made in slices.

    Attributes:
        outcomes: Each owner has a count of these from its beginning on. None: an owner's counts
            begin with what happens to it, which suits owners of which there may be thousands.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        outcome_label: str,
        owners: Callable[[], Collection[Owner]],
    ) -> None:
        self._name = name
        self._text = text
        self._labels = (*labels, outcome_label)
        self._owners = owners
        self.outcomes: Collection[str] | None = ()
        self._counts: defaultdict[Owner, Counter[str]] = defaultdict(Counter)

    def add(self, owner: Owner, outcome: str) -> None:
        self._counts[owner][outcome] += 1

    def of(self, owner: Owner) -> Counter[str]:
        """Returns counts by outcome."""
        return self._counts.get(owner, Counter())

    def collect(self) -> Iterator[Metric]:
        owners = set(self._owners())
        for gone in self._counts.keys() - owners:
            del self._counts[gone]
        shown = sorted(self._counts if self.outcomes is None else owners)
        for start in range(0, max(len(shown), 1), _PART_OWNERS):
            family = CounterMetricFamily(self._name, self._text, labels=self._labels)
            for owner in shown[start : start + _PART_OWNERS]:
                counts = self.of(owner)
                for outcome in dict.fromkeys([*(self.outcomes or ()), *counts]):
                    family.add_metric([*owner, outcome], counts[outcome])
            yield family
