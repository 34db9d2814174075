"""Defines the router's Prometheus metrics. Names and labels are part of its interface.

Counters and histograms are kept as things happen; figures about nodes are read from the registry
at each scrape, so they vanish together with their node.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Collection, Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edge.http.event_loop.loop_lateness import LoopLateness
from router.nodes.address import NodeRole
from router.nodes.node import Node, NodeState
from router.nodes.registry import NodeRegistry, ReportOutcome
from router.observe.first_byte_times import FIRST_BYTE_BUCKETS, FirstByteTimes
from router.observe.tally import Tally

# fmt: off
_DURATION_BUCKETS = (
    .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)
# fmt: on


_PART_NODES = 100


class NodeCollector(Collector):
    """Collects gauges about the nodes that exist now, a family of many nodes in parts: a scrape is
    made in slices."""

    def __init__(self, nodes: NodeRegistry) -> None:
        self._nodes = nodes

    def collect(self) -> Iterator[Metric]:
        yield self._states()
        yield from self._per_node(
            "tandem_router_node_open_requests",
            "Our requests on the node",
            lambda node: node.work.num_requests,
        )
        yield from self._per_node(
            "tandem_router_node_pending_tokens",
            "Prompt tokens we have sent that have not led to a first byte yet",
            lambda node: node.work.num_tokens,
        )
        yield from self._per_node(
            "tandem_router_node_report_age_seconds",
            "Since the last load report",
            lambda node: None if node.report is None else self._nodes.clock() - node.reported_at,
        )
        yield from self._per_node(
            "tandem_router_node_drained",
            "1 while an operator has taken the node out of use, else 0",
            lambda node: self._nodes.state(node) is NodeState.DRAINED,
        )

    def _states(self) -> Metric:
        family = GaugeMetricFamily(
            "tandem_router_nodes", "Nodes by tier and state", labels=["tier", "state"]
        )
        for role in NodeRole:
            states = Counts(self._nodes.state(node) for node in self._nodes.nodes(role))
            for state in NodeState:
                family.add_metric([role, state], states[state])
        return family

    def _per_node(
        self, name: str, text: str, figure: Callable[[Node], float | None]
    ) -> Iterator[Metric]:
        """Yields a figure of each node that has one."""
        nodes = self._nodes.all_nodes()
        for start in range(0, max(len(nodes), 1), _PART_NODES):
            family = GaugeMetricFamily(name, text, labels=["tier", "node"])
            for node in nodes[start : start + _PART_NODES]:
                value = figure(node)
                if value is not None:
                    family.add_metric([node.address.role, node.address.target], value)
            yield family


class RouterMetrics:
    """Holds all counters. `tenants` gives the names of those that exist now, `versions` the models
    with their versions."""

    def __init__(
        self,
        nodes: NodeRegistry,
        tenants: Callable[[], Iterable[str]] = tuple,
        versions: Callable[[], Collection[tuple[str, str]]] = tuple,
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(NodeCollector(nodes))
        self.by_node = Tally(
            "tandem_router_node_answers",
            "Attempts to have a decode node answer, by what became of them",
            ["tier", "node"],
            "outcome",
            lambda: [(n.address.role, n.address.target) for n in nodes.nodes(NodeRole.DECODE)],
        )
        self.by_tenant = Tally(
            "tandem_router_tenant_requests",
            "Answers given, by tenant and status; 499: the client left first",
            ["tenant"],
            "status",
            lambda: [(name,) for name in tenants()],
        )
        self.by_model = Tally(
            "tandem_router_model_requests",
            "Answers given, by model, the version that served it, and status",
            ["model", "version"],
            "status",
            versions,
        )
        self.first_byte = FirstByteTimes(versions)
        for collector in (self.by_model, self.by_node, self.by_tenant, self.first_byte):
            self.registry.register(collector)
        ProcessCollector(registry=self.registry)
        self.lateness = LoopLateness()
        self.registry.register(self.lateness)
        self._make_request_metrics()
        self._make_event_metrics()

    def _make_request_metrics(self) -> None:
        self.requests = Counter(
            "tandem_router_requests",
            "Answers given, by path and status; 499: the client left first",
            ["path", "status"],
            registry=self.registry,
        )
        self.open_requests = Gauge(
            "tandem_router_open_requests", "Requests being served", registry=self.registry
        )
        self.duration = Histogram(
            "tandem_router_request_duration_seconds",
            "From the whole request to the end of the answer",
            buckets=_DURATION_BUCKETS,
            registry=self.registry,
        )

    def _make_event_metrics(self) -> None:
        self.placements = Counter(
            "tandem_router_placements",
            "Placements by how the first prefill node was chosen, and what told the session",
            ["choice", "session"],
            registry=self.registry,
        )
        self.retries = Counter(
            "tandem_router_retries",
            "Requests tried on another decode node, by what happened on the one before",
            ["reason"],
            registry=self.registry,
        )
        self.node_failures = Counter(
            "tandem_router_node_failures",
            "Failures of decode nodes as seen by requests",
            ["reason"],
            registry=self.registry,
        )
        self.migrations = Counter(
            "tandem_router_migrations",
            "Answers that another decode node went on with, by what happened to the one before",
            ["reason"],
            registry=self.registry,
        )
        self.move_seconds = Histogram(
            "tandem_router_migration_seconds",
            "Silence of answers that moved to another node, by what took the time",
            ["phase"],
            buckets=FIRST_BYTE_BUCKETS,
            registry=self.registry,
        )
        self.broken_streams = Counter(
            "tandem_router_broken_streams",
            "Answers that broke off after their first byte",
            registry=self.registry,
        )
        self.ejections = Counter(
            "tandem_router_ejections",
            "Nodes left out after failures",
            ["tier"],
            registry=self.registry,
        )
        self.reports = Counter(
            "tandem_router_node_reports",
            "Load reports by what became of them",
            ["outcome"],
            registry=self.registry,
        )
        self.watch_failures = Counter(
            "tandem_router_watch_failures",
            "Broken or silent load report streams",
            ["tier"],
            registry=self.registry,
        )
        self.discovery_failures = Counter(
            "tandem_router_discovery_failures",
            "Name resolutions that failed or were empty",
            registry=self.registry,
        )

    def watch_failed(self, role: NodeRole) -> None:
        self.watch_failures.labels(role).inc()

    def report_came(self, outcome: ReportOutcome) -> None:
        self.reports.labels(outcome).inc()

    def totals(self) -> dict[str, float]:
        """Returns the figures that a person looks at first."""
        return {
            "requests": _sum(self.requests),
            "retries before the first byte": _sum(self.retries),
            "answers moved to another node": _sum(self.migrations),
            "broken answers": _sum(self.broken_streams),
            "placements at the session's home": _sum(self.placements, choice="home"),
            "placements elsewhere to spare a wait": _sum(self.placements, choice="spill"),
            "placements without a session's home": _sum(self.placements)
            - _sum(self.placements, choice="home")
            - _sum(self.placements, choice="spill"),
        }


def _sum(counter: Counter, **labels: str) -> float:
    """Returns the sum over all children that have `labels`."""
    return sum(
        sample.value
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and labels.items() <= sample.labels.items()
    )
