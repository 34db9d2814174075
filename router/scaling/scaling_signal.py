"""Says how many nodes of each tier this router's requests take so that the objectives hold.

1. blind      nothing is said: an objective is not set, nothing has listened for long enough, the
              speed of the nodes is unknown, or their reports are lost. Absent is no zero: an
              autoscaler keeps what there is
2. starting   in the first two minutes the answer is not below this router's share of the nodes
              that there are: a router that has just started has not seen the load yet
3. telling    prefill: seconds of computing that arrive in a second, at the speed that the nodes
              report, make the load of a queue (`router.scaling.capacity`), and what waits beyond
              the objective has to be caught up with
              decode: tokens that will be asked for in a second, at the largest batch whose step
              keeps the objective
-  nothing     there is work, and not one prefill node: at least one is asked for, even while blind
-  drained     a node that an operator has taken out of use is no capacity: its replica comes on top

Every router tells its own share, not rounded. Their sum is the number of nodes.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.nodes.address import NodeRole
from router.nodes.node import Node, NodeState
from router.nodes.report import NodeReport
from router.placement.prefill_outcome import PrefillOutcome
from router.request.info import RequestInfo
from router.scaling.capacity import PromptWork, StepFit, prefill_nodes
from router.scaling.work_rate import WorkRate

_LISTEN_S = 15.0
_START_S = 120.0
_CATCH_UP_S = 120.0
"""A backlog is worked off in this time; nodes that did it sooner would be idle soon."""
_TOLERATED = 1.1
"""A HorizontalPodAutoscaler does nothing while no more than a tenth is missing."""
_DEVIATIONS = 3.0
"""Sequences vary as Poisson does; this many standard deviations more than their mean must find
room, or prompts wait for it (square-root staffing)."""
_ITL_SPREAD = 1.3
"""The 99th percentile of the time between tokens over its mean, as measured on H200s."""
_MAX_KV_USAGE = 0.9
_NUM_WORKS = 512
_MEMORY = 200
_FIRST_OUTPUT = 400.0
_ALIVE = (NodeState.READY, NodeState.HALF_OPEN, NodeState.LEAVING, NodeState.DRAINING)

NodesOf = Callable[[NodeRole], Sequence[Node]]


@dataclass(frozen=True, slots=True)
class ScalingObjectives:
    """Holds what is promised, in seconds; 0: nothing is, and nothing is said of that tier."""

    ttft_s: float = 0.0
    itl_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class ScalingSignal:
    """Follows the requests to one model. `nodes` gives its nodes but those that are drained by
    call, which `num_drained` counts, `state` theirs; `clock` gives monotonic seconds; `num_routers`
    share the requests."""

    objectives: ScalingObjectives
    nodes: NodesOf
    state: Callable[[Node], NodeState]
    clock: Callable[[], float]
    num_routers: int = 1
    num_drained: Callable[[NodeRole], int] = lambda role: 0
    steps: StepFit = field(default_factory=StepFit)
    _since: float = field(init=False)
    _tokens: WorkRate = field(init=False)
    _outputs: WorkRate = field(init=False)
    _works: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_WORKS))
    _speed: float = 0.0
    """Prompt tokens a second of a node, as last reported by any."""
    _guessed: float = 1.0
    _computed: float = 1.0
    _output: float = _FIRST_OUTPUT
    _prompt: float = 0.0
    _num_outputs: int = 0
    _num_held: int = 0

    def __post_init__(self) -> None:
        self._since = self.clock()
        self._tokens = WorkRate(self._since)
        self._outputs = WorkRate(self._since)

    # What happens ------------------------------------------------------------------------------

    def arrived(self, request: RequestInfo) -> None:
        """Records a request that was let in. Of its prompt as much counts as of others had to be
        computed."""
        if not request.generates:
            return
        now = self.clock()
        tokens = self._work(request)
        self._works.append(tokens)
        self._tokens.add(now, tokens)
        self._outputs.add(now, self._answer(request))
        self._prompt += (request.num_prompt_tokens - self._prompt) / min(_MEMORY, len(self._works))

    def unfit(self, request: RequestInfo) -> None:
        """Records that a request that had arrived is a mistake of its client's, such as a prompt
        that is too long: nothing of it is computed."""
        if not request.generates or not self._works:
            return
        now = self.clock()
        tokens = self._work(request)
        before = min(_MEMORY, len(self._works)) - 1
        surplus = (request.num_prompt_tokens - self._prompt) / before if before else self._prompt
        self._prompt = max(0.0, self._prompt - surplus)
        self._works.remove(min(self._works, key=lambda work: abs(work - tokens)))
        self._tokens.take_back(now, tokens)
        self._outputs.take_back(now, self._answer(request))

    def observe(self, request: RequestInfo, outcome: PrefillOutcome) -> None:
        """Records what was computed of a prompt."""
        if not outcome.num_prompt_tokens:
            return
        keep = 1 - 1 / _MEMORY
        self._guessed = keep * self._guessed + max(1, request.num_prompt_tokens)
        self._computed = keep * self._computed + outcome.num_computed_tokens

    def finished(self, num_tokens: int, seconds: float, num_sequences: float) -> None:
        """Records a complete answer: its tokens, the time from the first to the last, and how many
        sequences its node ran."""
        self._num_outputs += 1
        self._output += (num_tokens - self._output) / min(_MEMORY, self._num_outputs)
        if num_tokens > 1:
            self.steps.observe(num_sequences, seconds / (num_tokens - 1))

    def held(self, change: int) -> None:
        """Counts requests that wait for a first prefill node."""
        self._num_held += change

    @property
    def has_held(self) -> bool:
        return self._num_held > 0

    # What it says ------------------------------------------------------------------------------

    @property
    def tokens_per_s(self) -> float:
        """Returns the prompt tokens that a node computes in a second; 0 while nothing has said."""
        speeds = [
            report.prefill_tokens_per_s
            for role in (NodeRole.PREFILL, NodeRole.DECODE)
            for report in self._reports(role)
            if report.prefill_tokens_per_s > 0
        ]
        if speeds:
            self._speed = statistics.median(speeds)
        return self._speed

    def desired(self, role: NodeRole) -> float | None:
        """Returns this router's share of the nodes that the tier should have; None: unknown."""
        wanted = self._in_use(role)
        return None if wanted is None else wanted + self.num_drained(role) / self.num_routers

    def _in_use(self, role: NodeRole) -> float | None:
        """Returns its share of those that requests may be sent to."""
        objective = self._objective(role)
        now = self.clock()
        if objective <= 0:
            return None
        if role is NodeRole.PREFILL and self._no_node_computes(now):
            return max(self._prefill(now) or 0.0, 1 / self.num_routers)
        if now - self._since < _LISTEN_S or self._reports_are_lost(role):
            return None
        wanted = self._prefill(now) if role is NodeRole.PREFILL else self._decode(now)
        if wanted is None or not math.isfinite(wanted):
            return None
        wanted *= _TOLERATED
        if now - self._since < _START_S:
            wanted = max(wanted, len(self.nodes(role)) / self.num_routers)
        return wanted

    def predicted_ttft_s(self) -> float | None:
        """Returns the time to the first token of a mean prompt that came now, on the node with the
        least to do; None while nothing can say."""
        speed = self.tokens_per_s
        nodes = self.nodes(NodeRole.PREFILL)
        if not speed or not nodes or not self._works:
            return None
        waiting = min(node.predicted_tokens for node in nodes)
        return (waiting + statistics.fmean(self._works)) / speed

    def _work(self, request: RequestInfo) -> float:
        """Returns the tokens that will have to be computed of a prompt."""
        return request.num_prompt_tokens * self._computed / self._guessed

    def _answer(self, request: RequestInfo) -> float:
        return min(self._output, request.max_tokens or self._output)

    def _objective(self, role: NodeRole) -> float:
        return self.objectives.ttft_s if role is NodeRole.PREFILL else self.objectives.itl_s

    def _no_node_computes(self, now: float) -> bool:
        has_work = self.has_held or self._tokens.rate(now) > 0
        return has_work and not self.nodes(NodeRole.PREFILL)

    def _reports_are_lost(self, role: NodeRole) -> bool:
        """Returns whether there are nodes, and none of them reports."""
        for tier in {role, NodeRole.DECODE}:
            nodes = self.nodes(tier)
            if nodes and not any(self.state(node) in _ALIVE for node in nodes):
                return True
        return not self.nodes(NodeRole.DECODE)

    def _prefill(self, now: float) -> float | None:
        tokens = self._tokens.peak(now)
        if tokens <= 0:
            return 0.0
        speed = self.tokens_per_s
        if not speed:
            return None
        service = self._service(speed)
        routers = self.num_routers
        load, ttft_s = tokens / speed, self.objectives.ttft_s
        wanted = prefill_nodes(load * routers, service, ttft_s) / routers
        waiting = sum(node.work.num_tokens for node in self.nodes(NodeRole.PREFILL))
        late_s = waiting / speed - wanted * ttft_s
        return max(wanted, load + late_s / _CATCH_UP_S)

    def _service(self, speed: float) -> PromptWork:
        works = sorted(self._works)
        mean = statistics.fmean(works)
        if mean <= 0:
            return PromptWork(1 / speed)
        cv2 = statistics.pvariance(works) / mean**2
        return PromptWork(mean / speed, cv2, works[int(0.99 * (len(works) - 1))] / speed)

    def _decode(self, now: float) -> float | None:
        if not self.steps.num_observed:
            return 0.0 if self._outputs.peak(now) <= 0 else None
        batch = self.steps.batch_within(self.objectives.itl_s / _ITL_SPREAD)
        tokens = self._outputs.peak(now)
        load = tokens * self.steps.seconds(batch) / batch
        room = self._kv_tokens() * _MAX_KV_USAGE / max(1.0, self._prompt + self._output)
        seconds = self._output * self.steps.seconds(batch)
        if room:
            # KV is held from the beginning of the prefill on.
            seconds = self._output * self.steps.seconds(min(batch, room)) + self._prefill_s()
            load = max(load, tokens / max(1.0, self._output) * seconds / room)
            batch = max(1.0, min(batch, room))
        reports = self._reports(NodeRole.DECODE)
        running = sum(report.num_running_requests for report in reports) / self.num_routers
        opened = sum(node.work.num_requests for node in self.nodes(NodeRole.DECODE))
        # What waits in either tier has to be decoded, too.
        late = max(0.0, opened - running) * seconds / batch / _CATCH_UP_S
        all_open = load * batch * self.num_routers
        spread = _DEVIATIONS * math.sqrt(all_open) / batch / self.num_routers
        return max(load + spread, load + late, running / batch)

    def _prefill_s(self) -> float:
        """Returns the time of a prompt on a prefill node that keeps the objective."""
        speed = self.tokens_per_s
        mean_s = statistics.fmean(self._works) / speed if speed and self._works else 0.0
        return max(mean_s, self.objectives.ttft_s / 4)

    def _reports(self, role: NodeRole) -> list[NodeReport]:
        return [node.report for node in self.nodes(role) if node.report is not None]

    def _kv_tokens(self) -> int:
        """Returns the room of the smallest decode node; 0 when nothing has said."""
        sizes = [report.num_kv_tokens for report in self._reports(NodeRole.DECODE)]
        return min((size for size in sizes if size), default=0)
