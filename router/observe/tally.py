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


class Tally(Collector):
    """Counts by owner. `labels` name the parts of an owner; `owners` are those that exist now.

    Attributes:
        outcomes: Each owner has a count of these from its beginning on.
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
        self.outcomes: Collection[str] = ()
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
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for owner in owners:
            counts = self.of(owner)
            for outcome in dict.fromkeys([*self.outcomes, *counts]):
                family.add_metric([*owner, outcome], counts[outcome])
        yield family
