"""Counts how long first bytes took, by model and version: two dozen series each, which go with
their model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from prometheus_client import Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

Version = tuple[str, str]

# fmt: off
FIRST_BYTE_BUCKETS = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)
# fmt: on
_CREATED = "_created"
_PART_VERSIONS = 10


class FirstByteTimes(Collector):
    """Holds the histogram. `versions` gives the models with their versions that exist now.

    The family is collected in parts, so that a scrape of many models can be made in slices. Times
    of creation are left out: the text format has them as a family of their own.
    """

    def __init__(self, versions: Callable[[], Collection[Version]]) -> None:
        self._versions = versions
        self._counted: set[Version] = set()
        self._histogram = Histogram(
            "tandem_router_time_to_first_byte_seconds",
            "From the whole request to the first byte of the node's answer",
            ["model", "version"],
            buckets=FIRST_BYTE_BUCKETS,
            registry=None,
        )

    def observe(self, version: Version, seconds: float, exemplar: dict[str, str] | None) -> None:
        self._counted.add(version)
        self._histogram.labels(*version).observe(seconds, exemplar)

    def collect(self) -> Iterator[Metric]:
        self._follow(set(self._versions()))
        for family in self._histogram.collect():
            samples = [each for each in family.samples if not each.name.endswith(_CREATED)]
            per_version = len(samples) // max(len(self._counted), 1)
            step = max(per_version, 1) * _PART_VERSIONS
            for start in range(0, max(len(samples), 1), step):
                part = Metric(family.name, family.documentation, family.type)
                part.samples = samples[start : start + step]
                yield part

    def _follow(self, known: set[Version]) -> None:
        """Begins the series of `known`, and ends those of models that are gone. While no node has
        said what it serves, requests are counted under what clients say."""
        for version in known - self._counted:
            self._histogram.labels(*version)
        for gone in self._counted - known if known else ():
            self._histogram.remove(*gone)
        self._counted = known or self._counted
