"""Does what all policies have in common: finds a decode node, or says why there is none.

A policy differs in how it ranks prefill nodes (`rank`).
"""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from router.errors import NoNodeAvailable
from router.nodes.address import NodeRole
from router.nodes.node import Node, NodeState
from router.nodes.registry import NodeRegistry
from router.placement.candidates.adapter_homes import home_nodes
from router.placement.candidates.decode_choice import DecodeChoice, OutputLengths, without
from router.placement.candidates.forced_endpoint import forced_node, forced_partners
from router.placement.candidates.node_pool import NodeGroup, NodePool
from router.placement.candidates.spare_nodes import SpareNodes
from router.placement.policy import Placement, PrefillChoice
from router.placement.prefill_outcome import PrefillOutcome
from router.request.info import RequestInfo

logger = logging.getLogger(__name__)

_MAX_SHOWN_NAME = 100
_NOT_ITS_FAULT = {
    *("resource_exhausted", "draining", "invalid_argument", "avoided", "not_found"),
    *("kv_avoided", "kv_slow", "kv_late", "kv_stalled", "kv_damaged", "kv_lost"),
}
"""Codes of a prefill node that works and does not want this request, or whose path to that decode
node is at fault: its reports say how long it is avoided."""


@dataclass(frozen=True, slots=True)
class RankedPrefills:
    """Ranks prefill nodes, best first. The rest is about the first of them."""

    nodes: Sequence[Node]
    choice: PrefillChoice
    num_new_tokens: int = 0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    prefix_holder: Node | None = None


_NONE = RankedPrefills((), PrefillChoice.NONE)


def _no_spare() -> NoNodeAvailable:
    return NoNodeAvailable("No node has capacity now that no other request uses. Try again later.")


class BasePolicy(ABC):
    """Hands the best `max_prefill_candidates` of the ranked nodes to the decode node."""

    def __init__(
        self,
        registry: NodeRegistry,
        rng: random.Random,
        *,
        decode_choices: int = 2,
        max_prefill_candidates: int = 3,
    ) -> None:
        self.registry = registry
        self.rng = rng
        self.pool = NodePool(registry=registry)
        self.outputs = OutputLengths()
        self._decode_choice = DecodeChoice(rng=rng, num_choices=decode_choices)
        self.max_prefill_candidates = max_prefill_candidates
        self.spare = SpareNodes(registry=registry)

    @abstractmethod
    def rank(self, request: RequestInfo, group: NodeGroup, decode: Node) -> RankedPrefills:
        """Ranks the prefill nodes of `group`, which is not empty."""

    def place(self, request: RequestInfo, tried: Collection[Node] = ()) -> Placement:
        num_kv_tokens = 0
        if request.generates:
            num_kv_tokens = request.num_prompt_tokens + self.outputs.expected(request)
        forced = forced_node(self.registry, request, tried)
        prefill = forced if forced and forced.address.role is NodeRole.PREFILL else None
        if forced is not None and prefill is None:
            decode = forced
        else:
            decode = self._pick_decode(request, tried, num_kv_tokens, prefill)
        group = self.pool.partners(decode, request.adapter_digest)
        if prefill is not None:
            ranked = RankedPrefills((prefill,), PrefillChoice.FORCED, request.num_prompt_tokens)
        elif request.is_idle_class:
            ranked = self._rank_spare(request, group, decode)
        elif group.nodes and request.generates:
            return self._place_prompts(request, group, decode, num_kv_tokens)
        else:
            ranked = _NONE
        return self._placed_by(ranked, request, decode, num_kv_tokens)

    def _place_prompts(
        self, request: RequestInfo, group: NodeGroup, decode: Node, num_kv_tokens: int
    ) -> Placement:
        """Places each prompt by itself, when those before it count where they go."""
        found = list[Placement]()
        with ExitStack() as held:
            for one in request.by_prompt():
                num_tokens = num_kv_tokens if not found else 0
                placement = self._placed_by(self.rank(one, group, decode), one, decode, num_tokens)
                held.enter_context(placement.hold_prefill())
                found.append(placement)
        return replace(found[0], others=tuple(found[1:])) if len(found) > 1 else found[0]

    def _placed_by(
        self, ranked: RankedPrefills, request: RequestInfo, decode: Node, num_kv_tokens: int
    ) -> Placement:
        placement = Placement(
            decode,
            tuple(ranked.nodes[: self.max_prefill_candidates]),
            ranked.choice,
            num_new_tokens=ranked.num_new_tokens,
            num_kv_tokens=num_kv_tokens,
            queue_s=ranked.queue_s,
            ttft_s=ranked.ttft_s,
            prefix_holder=ranked.prefix_holder,
            is_idle=request.is_idle_class,
        )
        self.placed(request, placement)
        return placement

    def _rank_spare(self, request: RequestInfo, group: NodeGroup, decode: Node) -> RankedPrefills:
        """Ranks prefill nodes that no other request uses; without one the decode node computes the
        prompt. Raises `NoNodeAvailable` where it may not."""
        spare = self.spare.prefills(group.nodes)
        if spare:
            return self.rank(request, NodeGroup(tuple(spare)), decode)
        if not self.spare.may_compute(decode):
            raise _no_spare()
        choice = PrefillChoice.LOCAL if group.nodes else PrefillChoice.NONE
        return RankedPrefills((), choice, request.num_prompt_tokens)

    def placed(self, request: RequestInfo, placement: Placement) -> None:
        """Records that a decision was made."""
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "request %s: decode %s, prefill %s (%s), about %d new tokens, first one in %.2f s",
                request.request_id,
                placement.decode.address,
                [str(node.address) for node in placement.prefills],
                placement.choice,
                placement.num_new_tokens,
                placement.ttft_s,
            )

    def observe(self, request: RequestInfo, placement: Placement, outcome: PrefillOutcome) -> None:
        """Judges prefill nodes that failed this request, and the one that did not."""
        for target, code in outcome.failures:
            node = self._prefill_node(placement, target)
            if node is not None and code not in _NOT_ITS_FAULT:
                self.registry.record_failure(node)
        node = self._prefill_node(placement, outcome.node)
        if node is not None:
            self.registry.record_success(node)

    def forget(self) -> None:
        """Forgets which nodes have which prompts, if it learns that."""
        return

    def finished(self, request: RequestInfo, num_tokens: int) -> None:
        self.outputs.observe(request.model, num_tokens)

    def _prefill_node(self, placement: Placement, target: str) -> Node | None:
        """Returns the node at `target`, if it still exists. Empty: the decode node computed."""
        if not target:
            return None
        named = [node for node in placement.prefills if node.address.target == target]
        return named[0] if named else self.registry.find(NodeRole.PREFILL, target)

    def _pick_decode(
        self,
        request: RequestInfo,
        tried: Collection[Node],
        num_kv_tokens: int,
        prefill: Node | None,
    ) -> Node:
        """Picks one that can use KV of `prefill`, if that must compute the prompt."""
        nodes = without(self.pool.decodes(request.model, request.adapter_digest).nodes, tried)
        if not nodes and tried:
            digest = request.adapter_digest
            nodes = self.pool.suspect_decodes(request.model, digest, tried)
        if not nodes:
            raise self._why_no_decode_node(request.adapter or request.model)
        if prefill is not None:
            nodes = forced_partners(nodes, prefill)
        if request.adapter:
            nodes = home_nodes(nodes, num_kv_tokens)
        if request.is_idle_class:
            nodes = self.spare.decodes(nodes, num_kv_tokens)
            if not nodes:
                raise _no_spare()
        return self._decode_choice.pick(nodes, num_kv_tokens)

    def _why_no_decode_node(self, model: str) -> NoNodeAvailable:
        nodes = self.registry.nodes(NodeRole.DECODE)
        if not nodes:
            return NoNodeAvailable("No decode node is known to the router yet. Try again shortly.")
        of_model = [
            node
            for node in nodes
            if not model
            or node.report is None
            or model in node.report.model_names
            or model in node.adapters.by_name
        ]
        states = [self.registry.state(node) for node in of_model]
        counts = ", ".join(f"{states.count(s)} {s}" for s in NodeState if s in states)
        known = f"{len(states)} known: {counts}" if states else "none known"
        which = f" of {model[:_MAX_SHOWN_NAME]!r}" if model else ""
        return NoNodeAvailable(
            f"No decode node{which} can take the request now ({known}). Try again shortly."
        )
