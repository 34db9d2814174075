"""Starts counters at zero, for every combination of labels that can be.

A counter that appears with its first event shows Prometheus no increase: an alert on `increase` or
`rate` misses the first burst, which is the one that matters.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from prometheus_client import Counter, Histogram

from router.nodes.address import NodeRole
from router.nodes.registry import ReportOutcome
from router.observe.metrics import RouterMetrics
from router.placement.policy import PrefillChoice
from router.relay.attempts.attempts import ANSWERED, Failure
from router.relay.journaled_relay import Interruption
from router.relay.move_times import PHASES
from router.request.info import SessionSource
from router.request.proxied_path import PROXIED_PATHS

STATUSES = (200, 400, 401, 403, 404, 413, 429, 499, 500, 502, 503, 504)
"""Clients may get these. Another one counts from its first time on."""


def start_at_zero(metrics: RouterMetrics) -> None:
    """Makes every series that events can change, but those of tenants: there may be thousands."""
    _make(metrics.requests, PROXIED_PATHS, map(str, STATUSES))
    _make(metrics.placements, PrefillChoice, SessionSource)
    _make(metrics.retries, Failure)
    _make(metrics.node_failures, Failure)
    _make(metrics.migrations, Interruption)
    _make(metrics.move_seconds, PHASES)
    _make(metrics.ejections, NodeRole)
    _make(metrics.watch_failures, NodeRole)
    _make(metrics.reports, ReportOutcome)
    metrics.by_node.outcomes = (ANSWERED, *Failure, *Interruption)
    metrics.by_model.outcomes = [str(status) for status in STATUSES]
    metrics.by_tenant.outcomes = None


def _make(family: Counter | Histogram, *values: Iterable[str]) -> None:
    for combination in product(*values):
        family.labels(*combination)
