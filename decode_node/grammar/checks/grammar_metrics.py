"""Tells Prometheus what checking the grammars of requests has cost, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from decode_node.grammar.checks.grammar_checker import GrammarChecker


class GrammarCollector(Collector):
    """Collects the counts of a `GrammarChecker`."""

    def __init__(self, checker: GrammarChecker) -> None:
        self._checker = checker

    def collect(self) -> Iterator[Metric]:
        checker = self._checker
        checks = CounterMetricFamily(
            "tandem_grammar_checks",
            "Grammars of requests: known from before, accepted, refused, or ended for their cost.",
            labels=["outcome"],
        )
        accepted = checker.num_checked - checker.num_refused - checker.num_killed
        for outcome, count in (
            ("known", checker.num_known),
            ("accepted", accepted),
            ("refused", checker.num_refused),
            ("killed", checker.num_killed),
        ):
            checks.add_metric([outcome], count)
        yield checks
        yield CounterMetricFamily(
            "tandem_grammar_check_seconds", "Time that checking took.", value=checker.seconds
        )
