"""Places by tandem's own policy: the least queue, and a prompt's prefix where there is one.

    candidates    the session's last node and its home, nodes with a cached prefix, the least loaded
    cost          estimated time to the first token of each, and what it computes that another has
    spill         the node with most of the prompt, unless the best one saves more than a margin
    learn         what was sent where (prefix index), and how long it took (service time),
                  of each model apart

A prompt of which nothing is cached goes where it will be computed first; of nodes that are equally
idle to its session's home, so that a router that was restarted finds it again. Nothing is shared
with other routers. They agree on homes because they hash alike, and on spills because all bound
them by the same loads.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from router.models.per_model import PerModel
from router.nodes.address import NodeRole
from router.nodes.node import Node
from router.nodes.registry import NodeRegistry
from router.placement.base_policy import BasePolicy, RankedPrefills
from router.placement.candidates.node_pool import NodeGroup
from router.placement.candidates.prefill_candidates import prefill_candidates
from router.placement.estimates.service_time import ServiceTime, ServiceTimeFit
from router.placement.estimates.ttft_estimate import TtftEstimator
from router.placement.local_prefill import LocalPrefillRule
from router.placement.policy import Placement, PrefillChoice
from router.placement.prefill_outcome import PrefillOutcome
from router.placement.prefixes.crowding import Crowding
from router.placement.prefixes.prefix_holder import find_holder
from router.placement.prefixes.prefix_index import PrefixIndex, PrefixMatch
from router.placement.prefixes.session_places import SessionPlaces
from router.placement.prefixes.spill import MARGIN, Margin
from router.request.info import RequestInfo

_DEFAULT_CACHE_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TandemParameters:
    """Tunes the policy; docs/routing.md says what each of them was measured against."""

    spill: Margin = MARGIN
    base_weight: float = 3.0
    queue_weight: float = 10.0
    prefill_tokens_per_s: float = 8000.0
    short_prompt_tokens: int = 0
    max_index_entries: int = 300_000


@dataclass(frozen=True, slots=True)
class ModelKnowledge:
    """Holds what was learned about one model: how long its prompts take, which prefill nodes have
    them cached, and which decode nodes with the answers behind them."""

    fit: ServiceTimeFit
    index: PrefixIndex
    answers: PrefixIndex
    crowding: Crowding
    estimator: TtftEstimator


class TandemPolicy(BasePolicy):
    def __init__(
        self,
        registry: NodeRegistry,
        rng: random.Random,
        parameters: TandemParameters | None = None,
        *,
        decode_choices: int = 2,
        max_prefill_candidates: int = 3,
    ) -> None:
        super().__init__(
            registry,
            rng,
            decode_choices=decode_choices,
            max_prefill_candidates=max_prefill_candidates,
        )
        self._parameters = parameters or TandemParameters()
        self._knowledge = PerModel(self._learn_model)
        self._places = SessionPlaces()
        self._local = LocalPrefillRule(self._parameters.short_prompt_tokens)
        self._indexed_members = -1
        registry.on_prefixes = self._note_prefixes

    def knowledge(self, node: Node) -> ModelKnowledge:
        """Returns what was learned about the model of a prefill node."""
        return self._knowledge.of(node.model)

    # Placing -----------------------------------------------------------------------------------

    def rank(self, request: RequestInfo, group: NodeGroup, decode: Node) -> RankedPrefills:
        self._forget_lost_nodes()
        known = self.knowledge(group.nodes[0])
        match = known.index.match(request.prefix_blocks)
        own = self._own_nodes(request, group)
        candidates = prefill_candidates(group, own, match, self.rng)
        new = {node: num_new_tokens(request, match, node) for node in candidates}
        if request.is_later_turn and own and own[0] in new:
            new[own[0]] = without_unseen(request, new[own[0]])
        num_prompt, now = request.num_prompt_tokens, self.registry.clock()
        costs = known.estimator.costs(new, num_prompt, now, decode)
        ranked = sorted(candidates, key=costs.cost_s.__getitem__)
        choice = self._stay_or_spill(request, ranked, costs.cost_s, new, known.fit.mean_s)
        if choice is PrefillChoice.HOME:
            choice = _relieve(request, known, ranked, new)
        alone_s = known.fit.time.seconds(num_prompt, num_prompt)
        first = ranked[0]
        with_kv_s = costs.ttft_s[first] + costs.kv_wait_s[first]
        local_s = self._local.local_s(decode, num_prompt, alone_s, with_kv_s)
        if local_s < math.inf:
            return RankedPrefills((), PrefillChoice.LOCAL, num_prompt, ttft_s=local_s)
        found = RankedPrefills(
            ranked, choice, new[first], costs.queue_s[first], costs.ttft_s[first]
        )
        matches = match, known.answers.match(request.prefix_blocks)
        num_own = match.num_blocks(first)
        return replace(found, prefix_holder=find_holder(num_own, first, matches, self.registry))

    def _own_nodes(self, request: RequestInfo, group: NodeGroup) -> list[Node]:
        """Returns where the session's last prompt went, if that is known, and the session's
        home."""
        if not request.session_key:
            return []
        last = self._places.find(request.session_key, group.members)
        home = group.rendezvous.home(request.session_key)
        return [home] if last is None else [last, home]

    def _stay_or_spill(
        self,
        request: RequestInfo,
        ranked: list[Node],
        costs: Mapping[Node, float],
        new: dict[Node, int],
        mean_s: float,
    ) -> PrefillChoice:
        """Decides for a prompt that is cached somewhere. Its holder moves to the front of `ranked`
        if it stays there."""
        best = ranked[0]
        holder = min(ranked, key=new.__getitem__)
        num_prompt = request.num_prompt_tokens
        num_cached = num_prompt - new[holder]
        if num_cached <= 0 or new[best] == new[holder]:
            return PrefillChoice.HOME if num_cached > 0 else PrefillChoice.LEAST_LOADED
        part = num_cached / num_prompt
        if not self._parameters.spill.keeps(costs[holder], costs[best], mean_s, part):
            return PrefillChoice.SPILL
        _move_to_front(ranked, holder)
        return PrefillChoice.HOME

    # Learning ----------------------------------------------------------------------------------

    def placed(self, request: RequestInfo, placement: Placement) -> None:
        super().placed(request, placement)
        if placement.prefills:
            placement.decode.work.note_pull(placement.prefills[0], request.num_prompt_tokens)
            if request.session_key:
                self._places.note(request.session_key, placement.prefills[0])
            self._learn_prefix(placement.prefills[0], request)
            self._learn_answer(placement.decode, request)

    def observe(self, request: RequestInfo, placement: Placement, outcome: PrefillOutcome) -> None:
        super().observe(request, placement, outcome)
        request = request.by_prompt()[0]
        node = self._prefill_node(placement, outcome.node)
        if node is None:
            return
        known = self.knowledge(node)
        if node in placement.prefills[:1]:
            known.crowding.missed(node, _missed_s(request, placement, outcome, known.fit.time))
        else:
            self._learn_prefix(node, request)
        new, prompt = outcome.num_computed_tokens, outcome.num_prompt_tokens
        fit = known.fit
        expected_s = fit.time.seconds(new, prompt)
        fit.observe(new, prompt, outcome.compute_s)
        if node.report is not None:
            fit.observe_queue(node.report.prefill_tokens_per_s)
        node.pace.observe(outcome.compute_s, expected_s)

    def _learn_prefix(self, node: Node, request: RequestInfo) -> None:
        if not request.prefix_blocks:
            return
        tokens = node.report.num_kv_tokens if node.report else 0
        capacity = int((tokens or _DEFAULT_CACHE_TOKENS) / max(1.0, request.tokens_per_block))
        self.knowledge(node).index.learn(node, request.prefix_blocks, capacity)

    def _learn_answer(self, decode: Node, request: RequestInfo) -> None:
        """Notes who will have the answer, before its report says so: a tool's result may follow at
        once."""
        if request.prefix_blocks and decode.report is not None and decode.report.serves_prefixes:
            self.knowledge(decode).answers.note(decode, request.prefix_blocks[-1:])

    def _note_prefixes(self, node: Node, ends: tuple[int, ...]) -> None:
        # Nodes may come and go for long while nothing asks this router for anything.
        self._forget_lost_nodes()
        known = self.knowledge(node)
        is_prefill = node.address.role is NodeRole.PREFILL
        (known.index if is_prefill else known.answers).note(node, ends)

    def _learn_model(self, model: str) -> ModelKnowledge:
        share = self._share_index(len(self._knowledge) + 1)
        fit = ServiceTimeFit(self._parameters.prefill_tokens_per_s)
        estimator = TtftEstimator(
            fit=fit,
            base_weight=self._parameters.base_weight,
            queue_weight=self._parameters.queue_weight,
        )
        return ModelKnowledge(fit, PrefixIndex(share), PrefixIndex(share), Crowding(), estimator)

    def _share_index(self, num_models: int) -> int:
        """Gives all models equal parts of the index, so that none evicts another's blocks."""
        share = self._parameters.max_index_entries // max(1, num_models)
        for known in self._knowledge:
            known.index.max_entries = share
        return share

    def forget(self) -> None:
        """Forgets what nodes have cached: their caches were reset."""
        for known in self._knowledge:
            known.index.retain(())
            known.answers.retain(())
            known.crowding.retain(())
        self._places.retain(())

    def _forget_lost_nodes(self) -> None:
        if self._indexed_members != self.registry.members_version:
            self._indexed_members = self.registry.members_version
            prefills = set(self.registry.nodes(NodeRole.PREFILL))
            decodes = set(self.registry.nodes(NodeRole.DECODE))
            self._places.retain(prefills)
            self._knowledge.retain({node.model for node in prefills})
            self._share_index(len(self._knowledge))
            for known in self._knowledge:
                known.index.retain(prefills)
                known.answers.retain(decodes)
                known.crowding.retain(prefills)


def _relieve(
    request: RequestInfo, known: ModelKnowledge, ranked: list[Node], new: Mapping[Node, int]
) -> PrefillChoice:
    """Sends the request elsewhere if what the first of `ranked` no longer has room for has cost as
    much as that does. Then another node with room comes to the front."""
    holder, num_prompt = ranked[0], request.num_prompt_tokens
    num_blocks = len(request.prefix_blocks)
    roomy = [node for node in ranked[1:] if known.index.has_room(node, num_blocks)]
    if not roomy:
        return PrefillChoice.HOME
    seconds = known.fit.time.seconds
    price_s = seconds(new[roomy[0]], num_prompt) - seconds(new[holder], num_prompt)
    if not known.crowding.pays(holder, price_s):
        return PrefillChoice.HOME
    _move_to_front(ranked, roomy[0])
    return PrefillChoice.SPILL


def _move_to_front(ranked: list[Node], node: Node) -> None:
    ranked.remove(node)
    ranked.insert(0, node)


def _missed_s(
    request: RequestInfo, placement: Placement, outcome: PrefillOutcome, time: ServiceTime
) -> float:
    """Returns the seconds in which the first node of `placement` computed what it was expected to
    have. Parts are compared: the router only guesses how many tokens a text has."""
    expected = placement.num_new_tokens / max(1, request.num_prompt_tokens)
    num_prompt = outcome.num_prompt_tokens
    num_missed = outcome.num_computed_tokens - expected * num_prompt
    if num_missed < request.tokens_per_block:
        return 0.0
    return time.seconds(num_missed, num_prompt) - time.base_s


def num_new_tokens(request: RequestInfo, match: PrefixMatch, node: Node) -> int:
    """Returns the prompt tokens that `node` would have to compute, at least 1. Tools stand in front
    of all blocks: what has one of these has them."""
    num_blocks = match.num_blocks(node)
    cached = int(num_blocks * request.tokens_per_block)
    cached += request.num_tool_tokens if num_blocks > 0 else 0
    return max(1, request.num_prompt_tokens - cached)


def without_unseen(request: RequestInfo, num_new: int) -> int:
    """Returns how much of `num_new` the node of the session's last turn has probably to compute: of
    the prompt's end, which is in no block of the index, half was there a turn before."""
    return max(1, num_new - round(min(num_new, request.tokens_per_block) / 2))
