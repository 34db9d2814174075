"""Counts the times between the tokens of answers, each as it comes: a histogram that is filled at
the end of an answer of a thousand tokens holds all others up for a millisecond.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import Exemplar, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.node.metrics.engine_metrics import ITL_BUCKETS, LABELS

_NAME = "vllm:inter_token_latency_seconds"
_TEXT = "Between outputs."


class TokenGaps:
    """Counts the gaps of one answer by the buckets of `ITL_BUCKETS`; the last one has no bound."""

    __slots__ = ("counts", "longest_s", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(ITL_BUCKETS) + 1)
        self.total_s = 0.0
        self.longest_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(ITL_BUCKETS, seconds)] += 1
        self.total_s += seconds
        if seconds > self.longest_s:
            self.longest_s = seconds


class GapCollector(Collector):
    """Tells Prometheus the gaps of all answers that have ended. Of each, the longest leads to its
    trace: one of thousands is enough."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._all = TokenGaps()
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, gaps: TokenGaps, exemplar: Mapping[str, str] | None) -> None:
        found = self._all
        found.counts = [a + b for a, b in zip(found.counts, gaps.counts, strict=True)]
        found.total_s += gaps.total_s
        if exemplar and any(gaps.counts):
            place = bisect_left(ITL_BUCKETS, gaps.longest_s)
            self._exemplars[place] = Exemplar(dict(exemplar), gaps.longest_s, time.time())

    def collect(self) -> Iterator[Metric]:
        histogram = HistogramMetricFamily(_NAME, _TEXT, labels=LABELS)
        uppers = [*map(str, ITL_BUCKETS), "+Inf"]
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for place, count in enumerate(accumulate(self._all.counts)):
            exemplar = self._exemplars.get(place)
            told = (uppers[place], float(count))
            buckets.append(told if exemplar is None else (*told, exemplar))
        histogram.add_metric(self._labels, buckets, self._all.total_s)
        yield histogram
