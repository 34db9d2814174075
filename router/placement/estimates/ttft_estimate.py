"""Estimates when a prefill node would have the first token, and what that costs all.

    ttft = queue + service
    cost = ttft + wait for KV + (weight - 1) · time of the tokens that another candidate has cached
    weight = base + per_queue · shortest queue / mean service time

queue     tokens that wait there (its report, and our own dispatches since), at the rate that it
          reports, or that its like report while it knows none; more when the report is old,
          because others have dispatched too. Not at the time that single prompts took: those
          computed in the same steps share it
service   the prompt itself, without the tokens that are cached there
wait      of KV behind the first token: `kv_paths`
weight    what is computed anew although a node has it delays all who come after, and its KV drives
          out what is cached for them. How much so depends on how busy the nodes are: when even the
          best of them has a queue, every second of computing is waited for by many. What no node
          has must be computed anyway, and counts once: counted more often it would make differences
          between queues look small
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from router.nodes.node import Node
from router.placement.estimates.kv_paths import kv_waits_s
from router.placement.estimates.service_time import ServiceTimeFit

_FRESH_S = 1.0
_STALENESS_PER_S = 0.25
_EQUAL_PACE = 1.25


class Costs(NamedTuple):
    """Holds seconds by node: of the queue, until the first token, until KV is there behind it, and
    what the choice between nodes goes by."""

    queue_s: Mapping[Node, float]
    ttft_s: Mapping[Node, float]
    kv_wait_s: Mapping[Node, float]
    cost_s: Mapping[Node, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftEstimator:
    fit: ServiceTimeFit
    base_weight: float = 3.0
    queue_weight: float = 10.0

    def queue_s(self, node: Node, now: float) -> float:
        """Returns the time until `node` is through with what it has."""
        waiting = node.predicted_tokens
        if not waiting:
            return 0.0
        return self._s_per_token(node) * waiting * staleness_factor(now - node.reported_at)

    def costs(
        self, num_new: Mapping[Node, int], num_prompt: int, now: float, decode: Node
    ) -> Costs:
        """Returns the costs of nodes, of which there is at least one. `decode` is to pull their
        KV."""
        queues = {node: self.queue_s(node, now) for node in num_new}
        seconds = self.fit.time.seconds
        services = {count: seconds(count, num_prompt) for count in set(num_new.values())}
        least = min(services.values())
        again = self.weight(min(queues.values())) - 1
        ttfts = {
            node: queues[node] + self.pace(node) * services[count]
            for node, count in num_new.items()
        }
        waits = kv_waits_s(decode, ttfts, num_prompt)
        costs = {
            node: ttfts[node] + waits[node] + again * (services[count] - least)
            for node, count in num_new.items()
        }
        return Costs(queues, ttfts, waits, costs)

    def weight(self, shortest_queue_s: float) -> float:
        """Returns what a second of computing what is cached elsewhere counts, in seconds of
        waiting."""
        return self.base_weight + self.queue_weight * shortest_queue_s / self.fit.mean_s

    def pace(self, node: Node) -> float:
        """Returns the pace of `node` as measured; before any prompt was, by the speed that it
        reports. Nodes that differ less than they do from one moment to the next are equal: the
        quickest of them would get every prompt that finds the others idle, too."""
        rate = _reported_rate(node)
        if node.pace.is_known or not rate:
            pace = node.pace.factor
        else:
            pace = 1 / (rate * self.fit.s_per_queued_token)
        return 1.0 if 1 / _EQUAL_PACE < pace < _EQUAL_PACE else pace

    def _s_per_token(self, node: Node) -> float:
        rate = _reported_rate(node)
        return 1 / rate if rate else self.fit.s_per_queued_token


def _reported_rate(node: Node) -> float:
    """Returns prompt tokens per second; 0 while the node knows none."""
    return node.report.prefill_tokens_per_s if node.report else 0.0


def staleness_factor(report_age_s: float) -> float:
    """Returns the factor by which a queue reported `report_age_s` ago is inflated."""
    return 1 + _STALENESS_PER_S * max(0.0, report_age_s - _FRESH_S)
