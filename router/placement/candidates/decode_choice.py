"""Chooses a decode node: of a few drawn at random, the one whose steps will be shortest.

Choosing between two random nodes rather than taking the best of all keeps routers that share
stale reports from all running to the same node. With many nodes a third draw finds room sooner.

    fits     KV in use, with this request at its end, stays below a part of the cache: a node that
             runs out of it preempts
    cost     sequences + context / tokens that cost as much as one sequence: a decode step reads
             the weights once for all, does a little work for each sequence, and reads the KV of all
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from router.nodes.node import Node
from router.placement.candidates.prefill_candidates import accepting
from router.request.info import RequestInfo

_MANY_NODES = 32
_TOKENS_PER_SEQUENCE = 1000
"""Tokens of context that slow an 8B model on one GPU about as much as one sequence more."""
_FIRST_GUESS = 400
_QUANTILE = 0.75
_STEP = 0.02


@dataclass(slots=True)
class OutputLengths:
    """Learns how long answers get: three in four are not longer. One number for each model, moved
    up and down by each answer in proportion (stochastic quantile estimation)."""

    _expected: dict[str, float] = field(default_factory=dict)

    def expected(self, request: RequestInfo) -> int:
        length = self._expected.get(request.model, _FIRST_GUESS)
        return round(min(length, request.max_tokens or length))

    def observe(self, model: str, num_tokens: int) -> None:
        length = self._expected.get(model, _FIRST_GUESS)
        way = _QUANTILE if num_tokens > length else _QUANTILE - 1
        self._expected[model] = max(1.0, length * (1 + _STEP * way))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeChoice:
    rng: random.Random
    num_choices: int = 2
    max_kv_usage: float = 0.9

    def pick(self, nodes: Sequence[Node], num_kv_tokens: int) -> Node:
        """Picks one of `nodes`, not empty, for a request that will hold `num_kv_tokens` at its
        end."""
        few = self._draw(nodes)
        roomy = [node for node in few if self.fits(node, num_kv_tokens)]
        if not roomy:
            others = [node for node in accepting(nodes) if self.fits(node, num_kv_tokens)]
            roomy = self._draw(others) if others else few
        return min(roomy, key=step_cost)

    def fits(self, node: Node, num_kv_tokens: int) -> bool:
        return node.kv_usage_with(num_kv_tokens) <= self.max_kv_usage

    def _draw(self, nodes: Sequence[Node]) -> list[Node]:
        count = self.num_choices + (len(nodes) >= _MANY_NODES)
        drawn = self.rng.sample(nodes, min(count, len(nodes)))
        return accepting(drawn) if any(node.health.accepts for node in drawn) else accepting(nodes)


def step_cost(node: Node) -> float:
    """Returns the cost of a decode step on `node`, in sequences."""
    size = node.report.num_kv_tokens if node.report else 0
    return node.predicted_requests + node.kv_usage_with(0) * size / _TOKENS_PER_SEQUENCE


def without(nodes: Sequence[Node], tried: Collection[Node]) -> Sequence[Node]:
    return [node for node in nodes if node not in tried] if tried else nodes
