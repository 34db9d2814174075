"""Which nodes serve a request: a decode node, and prefill nodes in order of preference.

    all nodes ─ Filter ─▶ those that may ─ Scorer ─▶ a cost each ─ Picker ─▶ the node

Decode: drawn at random, two of those that may; the one with the lower predicted load. Choosing
between two random nodes rather than taking the lowest of all keeps routers that share stale
reports from all running to the same node.

Prefill: the session's home first, because it holds the session's KV in its prefix cache; unless
its queue is longer than the shortest one by a factor and a margin, then the others by queue.

The parts are plain functions, so another policy is another composition of them.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from router.errors import ModelNotFound, NoNodeAvailable
from router.node import Node, NodeState
from router.node_address import NodeRole
from router.node_registry import NodeRegistry
from router.request_info import RequestInfo
from router.session import rank_by_rendezvous

logger = logging.getLogger(__name__)

_MAX_SHOWN_NAME = 100

Scorer = Callable[[Node], float]
"""The expected cost of giving the request to a node; lower is better."""


class PrefillChoice(StrEnum):
    """Why the first prefill node of a placement is the first."""

    HOME = "home"
    SPILL = "spill"
    LEAST_LOADED = "least_loaded"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefills` are ranked, best first; empty when the decode node must prefill by itself."""

    decode: Node
    prefills: tuple[Node, ...]
    choice: PrefillChoice


class Policy(Protocol):
    def place(self, request: RequestInfo, tried: Collection[Node] = ()) -> Placement:
        """Chooses nodes; `tried` decode nodes have already failed this request.

        Raises:
            NoNodeAvailable: no decode node can take it now; the message counts them by state.
            ModelNotFound: nodes are known, and none serves the model.
        """


# Filters: which nodes may be chosen ------------------------------------------------------------


def usable(registry: NodeRegistry, role: NodeRole) -> list[Node]:
    """Ready nodes; with none left, those whose state is only in doubt."""
    by_state = {node: registry.state(node) for node in registry.nodes(role)}
    ready = [node for node, state in by_state.items() if state is NodeState.READY]
    doubtful = (NodeState.SUSPECT, NodeState.EJECTED)
    return ready or [node for node, state in by_state.items() if state in doubtful]


def serving_model(nodes: Iterable[Node], model: str) -> list[Node]:
    """Nodes of `model`; all nodes when the request names none."""
    return [
        node for node in nodes if not model or (node.report and node.report.model_name == model)
    ]


def same_fingerprint(nodes: Iterable[Node], decode: Node) -> list[Node]:
    """Prefill nodes whose KV `decode` can use."""
    return [node for node in nodes if fingerprint(node) == fingerprint(decode)]


def with_partner(decodes: Sequence[Node], prefills: Iterable[Node]) -> Sequence[Node]:
    """Decode nodes that have a prefill node to work with; all, when none has."""
    known = {fingerprint(node) for node in prefills}
    return [node for node in decodes if fingerprint(node) in known] or decodes


def fingerprint(node: Node) -> str:
    return node.report.fingerprint if node.report else ""


# Scorers: what a choice costs ------------------------------------------------------------------


def decode_load(node: Node) -> float:
    """Requests on the node; between equal numbers the fuller KV cache costs more."""
    usage = node.report.kv_usage if node.report else 0.0
    return node.predicted_requests + min(usage, 0.999)


def queue_seconds(node: Node, default_tokens_per_s: float) -> float:
    """Time until a prefill node is through with what it has."""
    measured = node.report.prefill_tokens_per_s if node.report else 0.0
    return node.predicted_tokens / (measured or default_tokens_per_s)


# Pickers: from costs to a choice ---------------------------------------------------------------


def best_of_random(
    nodes: Sequence[Node], score: Scorer, num_choices: int, rng: random.Random
) -> Node:
    """The cheapest of `num_choices` nodes drawn at random (equal costs: the first drawn)."""
    return min(rng.sample(nodes, min(num_choices, len(nodes))), key=score)


def home_then_by_cost(
    nodes: Sequence[Node], request: RequestInfo, score: Scorer, spill_ratio: float, spill_s: float
) -> tuple[list[Node], PrefillChoice]:
    """The session's home, then its other nodes from the cheapest on; or, when home costs more than
    `(1 + spill_ratio) * cheapest + spill_s`, all from the cheapest on.

    Without a session all nodes rank by cost. Nodes of equal cost keep the order of the hash.
    """
    if not nodes:
        return [], PrefillChoice.NONE
    ranked = rank_by_rendezvous(request.session_key or request.request_id.encode(), nodes)
    by_cost = sorted(ranked, key=score)
    if not request.session_key:
        return by_cost, PrefillChoice.LEAST_LOADED
    home = ranked[0]
    if score(home) > (1 + spill_ratio) * score(by_cost[0]) + spill_s:
        return by_cost, PrefillChoice.SPILL
    return [home, *(node for node in by_cost if node is not home)], PrefillChoice.HOME


# The policy ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StickyPolicy:
    """Sessions stay on their prefill node within bounds of load; decode nodes share evenly."""

    registry: NodeRegistry
    rng: random.Random
    decode_choices: int = 2
    max_prefill_candidates: int = 3
    spill_ratio: float = 1.0
    spill_s: float = 0.5
    default_prefill_tokens_per_s: float = 8000.0

    def place(self, request: RequestInfo, tried: Collection[Node] = ()) -> Placement:
        prefills = usable(self.registry, NodeRole.PREFILL)
        decode = self._pick_decode(request, prefills, tried)
        partners = same_fingerprint(prefills, decode)
        ranked, choice = home_then_by_cost(
            partners, request, self._queue_seconds, self.spill_ratio, self.spill_s
        )
        placement = Placement(decode, tuple(ranked[: self.max_prefill_candidates]), choice)
        logger.debug(
            "request %s: decode %s, prefill %s (%s)",
            request.request_id,
            decode.address,
            [str(node.address) for node in placement.prefills],
            choice,
        )
        return placement

    def _pick_decode(
        self, request: RequestInfo, prefills: Sequence[Node], tried: Collection[Node]
    ) -> Node:
        nodes = usable(self.registry, NodeRole.DECODE)
        nodes = [node for node in serving_model(nodes, request.model) if node not in tried]
        if not nodes:
            raise self._why_no_decode_node(request.model)
        candidates = with_partner(nodes, prefills)
        return best_of_random(candidates, decode_load, self.decode_choices, self.rng)

    def _queue_seconds(self, node: Node) -> float:
        return queue_seconds(node, self.default_prefill_tokens_per_s)

    def _why_no_decode_node(self, model: str) -> NoNodeAvailable | ModelNotFound:
        names = self.registry.model_names()
        if model and names and model not in names:
            listed = ", ".join(repr(name) for name in sorted(names))
            shown = repr(model[:_MAX_SHOWN_NAME])
            return ModelNotFound(f"The model {shown} does not exist here. There is: {listed}.")
        states = [self.registry.state(node) for node in self.registry.nodes(NodeRole.DECODE)]
        if not states:
            return NoNodeAvailable("No decode node is known to the router yet. Try again shortly.")
        counts = ", ".join(f"{states.count(s)} {s}" for s in NodeState if s in states)
        return NoNodeAvailable(
            f"No decode node can take the request now ({len(states)} known: {counts}). "
            f"Try again shortly."
        )
