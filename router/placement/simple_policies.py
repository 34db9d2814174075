"""Places simply: to compare with, and for clusters where sessions mean nothing.

round-robin     one prefill node after the other
least-loaded    the one with the fewest tokens waiting, as far as is known
sticky          the session's home, whatever its load; least-loaded without a session
"""

from __future__ import annotations

import itertools
from heapq import nsmallest
from operator import attrgetter

from router.nodes.node import Node
from router.placement.base_policy import BasePolicy, RankedPrefills
from router.placement.candidates.node_pool import NodeGroup
from router.placement.candidates.prefill_candidates import accepting
from router.placement.policy import PrefillChoice
from router.request.info import RequestInfo


class RoundRobinPolicy(BasePolicy):
    _next = 0

    def rank(self, request: RequestInfo, group: NodeGroup, decode: Node) -> RankedPrefills:
        nodes = accepting(group.nodes)
        start = self._next % len(nodes)
        self._next += 1
        in_turn = [*nodes[start:], *nodes[:start]]
        return RankedPrefills(in_turn, PrefillChoice.ROUND_ROBIN, request.num_prompt_tokens)


class LeastLoadedPolicy(BasePolicy):
    def rank(self, request: RequestInfo, group: NodeGroup, decode: Node) -> RankedPrefills:
        nodes = self.by_load(group)
        return RankedPrefills(nodes, PrefillChoice.LEAST_LOADED, request.num_prompt_tokens)

    def by_load(self, group: NodeGroup) -> list[Node]:
        """Returns as many as are handed on. Which of equal loads comes first is left to chance."""
        nodes = accepting(group.nodes)
        start = self.rng.randrange(len(nodes))
        in_turn = itertools.chain(nodes[start:], nodes[:start])
        return nsmallest(self.max_prefill_candidates, in_turn, key=attrgetter("predicted_tokens"))


class StickyPolicy(LeastLoadedPolicy):
    def rank(self, request: RequestInfo, group: NodeGroup, decode: Node) -> RankedPrefills:
        if not request.session_key:
            return super().rank(request, group, decode)
        home = group.rendezvous.home(request.session_key)
        nodes = [home, *(node for node in self.by_load(group) if node is not home)]
        return RankedPrefills(nodes, PrefillChoice.HOME, request.num_prompt_tokens)
