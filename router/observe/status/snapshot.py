"""Puts together what the status page shows: sections of plain facts, each encoded as JSON.

Nothing here is from a prompt or an answer. Sessions have names that stand for them
(`request_view.session_name`); keys of clients are nowhere near.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from edge.http.event_loop.long_work import in_pieces
from edge.installed_version import installed_version
from router.admission.admission_gate import AdmissionGate
from router.admission.class_line import Waiting
from router.nodes.node import Node
from router.nodes.registry import NodeRegistry
from router.observe.batch_metrics import BatchFacts
from router.observe.metrics import RouterMetrics
from router.observe.status.log_histogram import LogHistogram
from router.observe.status.node_rates import NodeRates
from router.observe.status.recent_figures import NUM_SLOTS, SLOT_S, Gauges, Slot
from router.observe.status.recent_requests import RecentRequests
from router.observe.status.request_view import encoded_record, session_name

logger = logging.getLogger(__name__)

OPEN_SHOWN = 12
"""Newest of the requests that are open."""
_SESSIONS_SHOWN = 12
_TENANTS_SHOWN = 50
_SESSION_RECENT_S = 600.0
_STALE_REPORT_S = 2.0
_BATCHES_SHOWN = 20
_SAMPLE_S = 1.0

_VERSION = installed_version()

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Is the cluster at one moment, in JSON. `nodes` are by name; `ended` has requests by number,
    and holds the last of them."""

    sections: Mapping[str, bytes]
    nodes: Mapping[str, bytes]
    open: bytes
    ended: Mapping[int, bytes]


@dataclass(slots=True, kw_only=True)
class StatusSources:
    """Holds what snapshots are made from. `state` is the router's, `tenants` the names of all,
    `gates` those of the models that were asked for, `versions` all models with their versions."""

    state: Callable[[], str]
    tenants: Callable[[], Collection[str]]
    registry: NodeRegistry
    gates: Callable[[], Mapping[str, AdmissionGate]]
    versions: Callable[[], Collection[tuple[str, str]]]
    metrics: RouterMetrics
    recent: RecentRequests
    batches: Callable[[], Sequence[BatchFacts]] = tuple
    rates: NodeRates = field(init=False)
    _started_at: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.rates = NodeRates(self.registry)

    async def run(self) -> None:
        """Samples each second until cancelled."""
        while True:
            try:
                await self.sample()
            except Exception:
                logger.exception("no sample for the status page")
            await asyncio.sleep(_SAMPLE_S)

    async def sample(self) -> None:
        """Takes in how the cluster is now. To be called each second."""
        await self.rates.sample()
        self.recent.figures.sample(self._gauges())

    def _gauges(self) -> Gauges:
        return self.rates.gauges(sum(len(gate.line) for gate in self.gates().values()))

    async def snapshot(self) -> Snapshot:
        """Returns the cluster, node after node: others use the event loop between some of them."""
        total = self.recent.figures.total()
        nodes = sorted(self.registry.all_nodes(), key=_name)
        recent, ended = self.recent, list(self.recent.ended)
        first = recent.num_ended - len(ended) + 1
        sections = {
            "router": self._router(),
            "cluster": self._cluster(total),
            "curves": self._curves(),
            "queue": self._queue(),
            "transfers": self._transfers(total),
            "sessions": self._sessions(),
            "tenants": self._tenants(total),
            "models": self._models(),
            "batches": self._batches(),
            "totals": self.metrics.totals(),
            "names": [_name(node) for node in nodes],
        }
        sessions = recent.sessions.by_node(time.time() - _SESSION_RECENT_S)
        shown = [encoded_record(record, 0) for record in recent.newest_open(OPEN_SHOWN)]
        encode, numbered = msgspec.json.encode, list(enumerate(ended, first))
        return Snapshot(
            sections={name: encode(facts) for name, facts in sections.items()},
            nodes={
                _name(node): encode(self._node(node, sessions[str(node.address)]))
                async for node in in_pieces(nodes)
            },
            open=b"[%b]" % b",".join(shown),
            ended={i: encoded_record(record, i) async for i, record in in_pieces(numbered)},
        )

    def _batches(self) -> Sequence[Facts]:
        """Returns those that this router works on, the oldest first."""
        return [
            {
                "id": one.id,
                "tenant": one.tenant,
                "model": one.model,
                "status": one.status,
                "total": one.num_total,
                "completed": one.num_completed,
                "failed": one.num_failed,
                "expires_at": round(one.expires_at),
            }
            for one in self.batches()[:_BATCHES_SHOWN]
        ]

    def _router(self) -> Facts:
        return {
            "state": self.state(),
            "version": _VERSION,
            "started_at": round(self._started_at),
            "models": sorted(self.registry.model_names())[:16],
        }

    def _cluster(self, total: Slot) -> Facts:
        gauges = self._gauges()
        seconds = self.recent.figures.age_s(total)
        return {
            "open": self.recent.num_open,
            "running": gauges.running,
            "waiting": gauges.waiting,
            "tokens_in_per_s": _brief(gauges.tokens_in),
            "tokens_out_per_s": _brief(gauges.tokens_out),
            "requests_per_s": _brief(total.num_requests / seconds),
            "ttft": _quantiles(total.ttft),
            "itl": _quantiles(total.itl),
            "queue": _quantiles(total.queue),
            "requests": total.num_requests,
            "failed": total.num_failed,
            "limited": total.num_limited,
            "left": total.num_left,
            "moves": total.num_moves,
        }

    def _curves(self) -> Facts:
        curve = self.recent.figures.curve
        return {
            "slot_s": SLOT_S,
            "slots": NUM_SLOTS,
            "running": curve(lambda slot: _mean(slot.running, slot)),
            "waiting": curve(lambda slot: _mean(slot.waiting, slot)),
            "tokens_in": curve(lambda slot: _mean(slot.tokens_in, slot)),
            "tokens_out": curve(lambda slot: _mean(slot.tokens_out, slot)),
            "ttft": curve(lambda slot: _median(slot.ttft)),
            "itl": curve(lambda slot: _median(slot.itl)),
            "queue": curve(lambda slot: _median(slot.queue)),
            "failed": curve(lambda slot: _part(slot.num_failed, slot.num_requests)),
        }

    def _queue(self) -> Facts:
        gates = self.gates()
        now = self.registry.clock()
        line = sorted((waiting for gate in gates.values() for waiting in gate.line), key=_since)
        refusals: Counter[str] = Counter()
        for gate in gates.values():
            refusals.update(gate.refusals)
        return {
            "waiting": len(line),
            "limit": sum(gate.limits.max_waiting for gate in gates.values()),
            "started": sum(gate.num_started for gate in gates.values()),
            "slots": sum(gate.num_slots() for gate in gates.values()),
            "oldest_s": round(now - line[0].since, 1) if line else 0,
            "drain_s": round(max(g.drain_s() for g in gates.values() if g.line), 1) if line else 0,
            "refusals": dict(sorted(refusals.items())),
            "line": [
                {
                    "tenant": waiting.request.tenant.name,
                    "model": waiting.request.model,
                    "priority": waiting.request.priority.name.lower(),
                    "prompt": waiting.request.num_prompt_tokens,
                    "waited_s": round(now - waiting.since, 1),
                }
                for waiting in line[:OPEN_SHOWN]
            ],
        }

    def _models(self) -> Sequence[Facts]:
        """Returns every version of every model that requests are counted under."""
        gates, facts = self.gates(), []
        for model, version in sorted(self.versions())[:_TENANTS_SHOWN]:
            counts = self.metrics.by_model.of((model, version))
            gate = gates.get(version)
            facts.append(
                {
                    "model": model,
                    "version": version,
                    "waiting": len(gate.line) if gate else 0,
                    "requests": sum(counts.values()),
                    "by_status": dict(sorted(counts.items())),
                }
            )
        return facts

    def _transfers(self, total: Slot) -> Facts:
        reports = [node.report for node in self.registry.all_nodes() if node.report]
        seconds = self.recent.figures.age_s(total)
        return {
            "receiving": sum(report.num_receiving for report in reports),
            "held": sum(report.num_held for report in reports),
            "requests": total.transfer.num,
            "bytes_per_s": _brief(total.transfer_bytes / seconds),
            "prefill": _quantiles(total.prefill),
            "transfer": _quantiles(total.transfer),
            "join": _quantiles(total.join),
        }

    def _sessions(self) -> Facts:
        table = self.recent.sessions
        return {
            "known": len(table),
            "shown": [
                {
                    "id": session_name(key),
                    "tenant": seen.tenant,
                    "by": seen.source,
                    "requests": seen.num_requests,
                    "tokens": seen.num_tokens,
                    "last_at": round(seen.last_at),
                    "decode": seen.decode,
                    "prefill": seen.prefill,
                }
                for key, seen in table.newest(_SESSIONS_SHOWN)
            ],
        }

    def _tenants(self, total: Slot) -> Sequence[Facts]:
        seconds = self.recent.figures.age_s(total)
        facts = []
        busiest = heapq.nsmallest(
            _TENANTS_SHOWN, self.tenants(), key=lambda name: (-total.by_tenant[name], name)
        )
        for name in busiest:
            counts = self.metrics.by_tenant.of((name,))
            facts.append(
                {
                    "tenant": name,
                    "requests_per_s": _brief(total.by_tenant[name] / seconds),
                    "tokens_per_s": _brief(total.tokens_by_tenant[name] / seconds),
                    "failed": total.failed_by_tenant[name],
                    "requests": sum(counts.values()),
                    "by_status": dict(sorted(counts.items())),
                }
            )
        return facts

    def _node(self, node: Node, num_sessions: int) -> Facts:
        report, rates = node.report, self.rates.of(node)
        facts: dict[str, Any] = {
            "tier": node.address.role,
            "node": str(node.address),
            "state": self.registry.state(node),
            "ours": node.work.num_requests,
            "sessions": num_sessions,
        }
        if report is None:
            return facts
        age_s = self.registry.clock() - node.reported_at
        backlog = report.num_waiting_tokens / (report.prefill_tokens_per_s or float("inf"))
        return facts | {
            "model": report.model_name,
            "version": report.version,
            "host": report.host_name,
            "running": report.num_running_requests,
            "waiting": report.num_waiting_requests,
            "backlog_tokens": report.num_waiting_tokens,
            "backlog_s": _brief(backlog),
            "kv": round(report.kv_usage, 3),
            "kv_tokens": report.num_kv_tokens,
            "tokens_in_per_s": _brief(rates.tokens_in),
            "tokens_out_per_s": _brief(rates.tokens_out),
            "hits": None if rates.hit_share is None else round(rates.hit_share, 3),
            "host_hits": round(rates.host_share, 3),
            "disk_hits": round(rates.disk_share, 3),
            "accepted": [round(part, 2) for part in rates.accepted],
            "receiving": report.num_receiving,
            "held": report.num_held,
            "preemptions": report.totals.num_preemptions,
            "late_s": int(age_s) if age_s > _STALE_REPORT_S else 0,
            "fingerprint": report.fingerprint,
        }


def _name(node: Node) -> str:
    """Returns a name that sorts prefill nodes after decode nodes, and by address."""
    return f"{node.address.role} {node.address}"


def _since(waiting: Waiting) -> float:
    return waiting.since


def _quantiles(histogram: LogHistogram) -> Facts:
    """Returns seconds; without figures where nothing was counted."""
    if not histogram.num:
        return {"n": 0}
    quantiles = (("p50", 0.5), ("p99", 0.99))
    return {"n": histogram.num, **{k: _brief(histogram.quantile(part)) for k, part in quantiles}}


def _median(histogram: LogHistogram) -> float | None:
    return _brief(histogram.quantile(0.5)) if histogram.num else None


def _mean(total: float, slot: Slot) -> float | None:
    return _brief(total / slot.samples) if slot.samples else None


def _part(count: int, total: int) -> float | None:
    return round(count / total, 4) if total else None


def _brief(value: float) -> float:
    """Returns three digits of it: the rest would change without meaning anything."""
    return float(f"{value:.3g}")
