"""Makes rates of what nodes count: each second their totals are sampled, ten seconds are kept."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from edge.http.event_loop.long_work import in_pieces
from router.nodes.node import Node
from router.nodes.registry import NodeRegistry
from router.nodes.report import NodeTotals
from router.observe.status.recent_figures import Gauges

_WINDOW = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Holds rates of one node, per second. `hit_share`: the part of its prompt tokens that it need
    not compute, 0..1; None without prompts. `host_share`, `disk_share`: what of these had left the
    cache, and came back from there. `accepted`: the part of steps with drafts in which the
    draft at each place was right."""

    tokens_in: float = 0.0
    tokens_out: float = 0.0
    hit_share: float | None = None
    host_share: float = 0.0
    disk_share: float = 0.0
    accepted: tuple[float, ...] = ()


_NO_RATES = Rates()


@dataclass(slots=True)
class _Samples:
    epoch: int
    totals: deque[tuple[float, NodeTotals]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    rates: Rates = _NO_RATES


class NodeRates:
    """Samples nodes. One that is restarted, or gone, is forgotten."""

    def __init__(self, registry: NodeRegistry) -> None:
        self._registry = registry
        self._samples: dict[object, _Samples] = {}
        self._gauges = Gauges()

    async def sample(self) -> None:
        """Takes in the newest report of each node. To be called each second."""
        kept: dict[object, _Samples] = {}
        running = waiting = 0
        tokens_in = tokens_out = 0.0
        async for node in in_pieces(self._registry.all_nodes()):
            report = node.report
            if report is None:
                continue
            samples = self._samples.get(node.address)
            if samples is None or samples.epoch != report.epoch:
                samples = _Samples(report.epoch)
            kept[node.address] = samples
            if not samples.totals or samples.totals[-1][0] < node.reported_at:
                samples.totals.append((node.reported_at, report.totals))
                if len(samples.totals) > 1:
                    (then, old), (now, new) = samples.totals[0], samples.totals[-1]
                    samples.rates = _rates(old, new, now - then)
            running += report.num_running_requests
            waiting += report.num_waiting_requests
            tokens_in += samples.rates.tokens_in
            tokens_out += samples.rates.tokens_out
        self._samples = kept
        self._gauges = Gauges(
            running=running, waiting=waiting, tokens_in=tokens_in, tokens_out=tokens_out
        )

    def of(self, node: Node) -> Rates:
        samples = self._samples.get(node.address)
        return _NO_RATES if samples is None else samples.rates

    def gauges(self, num_waiting_here: int) -> Gauges:
        """Returns the cluster as of the last sample; `num_waiting_here` requests wait in this
        router's line."""
        return replace(self._gauges, waiting=num_waiting_here + self._gauges.waiting)


def _rates(old: NodeTotals, new: NodeTotals, seconds: float) -> Rates:
    computed = new.prompt_tokens_computed - old.prompt_tokens_computed
    cached = new.prompt_tokens_cached - old.prompt_tokens_cached
    prompts = computed + cached
    from_host = new.prompt_tokens_from_host - old.prompt_tokens_from_host
    from_disk = new.prompt_tokens_from_disk - old.prompt_tokens_from_disk
    # A prefill node has counted prompts whose KV comes from there, cached part included.
    is_pulling = new.prompt_tokens_transferred > old.prompt_tokens_transferred
    num_drafts = new.num_drafts - old.num_drafts
    before = old.num_accepted_per_pos + (0,) * len(new.num_accepted_per_pos)
    return Rates(
        tokens_in=max(0, computed if is_pulling else prompts) / seconds,
        tokens_out=max(0, new.generation_tokens - old.generation_tokens) / seconds,
        hit_share=cached / prompts if prompts > 0 else None,
        host_share=from_host / prompts if prompts > 0 else 0.0,
        disk_share=from_disk / prompts if prompts > 0 else 0.0,
        accepted=tuple(
            (right - was) / num_drafts
            for right, was in zip(new.num_accepted_per_pos, before, strict=False)
        )
        if num_drafts > 0
        else (),
    )
