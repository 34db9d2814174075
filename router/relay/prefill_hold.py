"""Holds prompts while there is no prefill node, if one is worth waiting for.

A tier that is scaled to zero starts again because something asks: the router reports demand to the
autoscaler (`router.scaling`), and meanwhile decides for each prompt

    local    what decode nodes have to compute already, and this prompt, in the steps of answers
    remote   what is left of a node's start, and the prompts that are held before this one

1. local     it is in time, or sooner than remote: the decode node computes the prompt
2. held      remote is sooner: the prompt waits, and is looked at again whenever something changes
3. placed    a prefill node is there
-  over      nothing came within the limit: the client gets an error (503, Retry-After)

A start that takes longer than expected is expected to take as long again as it is late.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from router.errors import Overloaded
from router.models.per_model import PerModel
from router.nodes.node import Node
from router.placement.candidates.node_pool import NodePool
from router.relay.attempts.node_wait import NodeWait
from router.request.info import RequestInfo
from router.scaling.scaling_signal import ScalingSignal

_DISTURBANCE = 1.3
"""A prompt takes this much longer in the steps of running answers."""
_LEARN = 0.5


@dataclass(slots=True)
class _Held:
    """Counts the prompts of one model that wait. `since`: when the first began to."""

    num_tokens: int = 0
    num_requests: int = 0
    since: float = 0.0


@dataclass(slots=True, kw_only=True)
class PrefillHold:
    """Holds a prompt for `limit_s` at most; 0: never. `start_s` is the time that a prefill node
    takes to start, and follows what is seen. `pool`: the nodes that requests are placed on."""

    pool: NodePool
    signals: PerModel[ScalingSignal]
    limit_s: float
    start_s: float
    default_tokens_per_s: float
    rng: random.Random = field(default_factory=random.Random)
    clock: Callable[[], float] = time.monotonic
    _held: PerModel[_Held] = field(
        default_factory=lambda: PerModel(
            lambda model: _Held(), is_used=lambda held: held.num_requests > 0
        )
    )

    async def wait(self, request: RequestInfo, time_left_s: float) -> None:
        """Returns when the request is to be placed.

        Raises:
            Overloaded: it was held for as long as it may be, or as its deadline allows.
        """
        if not self.limit_s or not request.generates or not self._is_worth_it(request):
            return
        limit_s = min(self.limit_s, time_left_s)
        pauses = NodeWait(self.pool.registry, time.monotonic() + limit_s, self.rng)
        with self._counted(request) as held:
            while self._is_worth_it(request, held):
                if not await pauses.pause():
                    raise Overloaded(
                        f"No prefill node has started within {limit_s:.0f} s, and decode nodes "
                        "would take longer to compute the prompt themselves. Try again later.",
                        retry_after_s=max(1, math.ceil(self._start_left_s(held))),
                    )
            if self._has_prefills(self.pool.decodes(request.model).nodes):
                self.start_s += _LEARN * (self.clock() - held.since - self.start_s)

    def _is_worth_it(self, request: RequestInfo, held: _Held | None = None) -> bool:
        decodes = self.pool.decodes(request.model).nodes
        if not decodes or self._has_prefills(decodes):
            return False
        signal = self.signals.of(request.model)
        speed = signal.tokens_per_s or self.default_tokens_per_s
        waiting = min(node.predicted_tokens for node in decodes)
        local_s = _DISTURBANCE * (waiting + request.num_prompt_tokens) / speed
        objective_s = request.ttft_deadline_s or signal.objectives.ttft_s
        before = held or self._held.of(request.model)
        tokens = before.num_tokens + (0 if held else request.num_prompt_tokens)
        return local_s > objective_s and self._start_left_s(before) + tokens / speed < local_s

    def _start_left_s(self, held: _Held) -> float:
        if not held.num_requests:
            return self.start_s
        return abs(self.start_s - (self.clock() - held.since))

    @contextmanager
    def _counted(self, request: RequestInfo) -> Iterator[_Held]:
        held = self._held.of(request.model)
        signal = self.signals.of(request.model)
        if not held.num_requests:
            held.since = self.clock()
        held.num_requests += 1
        held.num_tokens += request.num_prompt_tokens
        signal.held(1)
        try:
            yield held
        finally:
            held.num_requests -= 1
            held.num_tokens -= request.num_prompt_tokens
            signal.held(-1)

    def _has_prefills(self, decodes: Sequence[Node]) -> bool:
        """Returns whether prefill nodes work for the decode nodes of a model: where they work for
        some, the others are not among them."""
        return any(self.pool.partners(decode).nodes for decode in decodes[:1])
