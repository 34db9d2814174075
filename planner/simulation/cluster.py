"""A cluster in virtual time: routers that run the router's own code, nodes that only count.

    arrival ──▶ a router places it ──▶ prefill node: queue, then steps ──▶ first token
                     ▲                        │                                │
                     └── load reports ◀───────┘      decode node: steps, until the last token

Prefill nodes compute prompts in order of arrival; their prefix caches hold the most recent blocks.
Without prefill nodes the decode nodes compute prompts, in the steps of their sequences. Reports
reach every router each `report_s`, and 20 ms after a prompt enters or leaves a node; they tell of
the prompts computed since the last one, as real nodes do. Routers share nothing.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from engine.contracts.steps.step_launches import StepLaunches
from engine.sched.rows.step_slack import StepSlack
from planner.simulation.engine import SimEngine
from planner.simulation.idle_work import IdleWork
from planner.simulation.jobs import Job, SimRouter
from planner.simulation.measured import Measured
from planner.simulation.nodes import PrefixCache, SimDecodeNode, SimPrefillNode
from planner.simulation.reporting import Reporting
from planner.simulation.requests import SimRequest
from planner.simulation.step_filling import InOrderOfArrival, StepFilling
from planner.simulation.step_times import PrefillCost, StepTimes
from planner.simulation.virtual_time import VirtualTime
from router.admission.admission_gate import AdmissionGate, GateLimits
from router.admission.class_line import Waiting
from router.errors import NoNodeAvailable, Overloaded
from router.nodes.address import NodeAddress, NodeRole
from router.nodes.registry import NodeRegistry
from router.placement.candidates.spare_nodes import SpareNodes
from router.placement.policy import Policy
from router.placement.prefill_outcome import PrefillOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """Describes the cluster.

    Attributes:
        block_tokens, cache_blocks: Size of a block of the prefix caches, and of each cache.
        max_waiting_tokens: A prefill node with more refuses; 0: none does.
        gate: Admission at the routers; None: all are admitted.
        reports_always: Also while nothing waits for them.
        deadline_s: Time to the first token that requests name; 0: none.
        steps: Times of steps.
        batched: Steps take prompts up to `max_batched_tokens`, and decode nodes step too, with room
            for `max_sequences`. Otherwise a step is one prompt, and tokens come at a fixed pace.
        itl_objective_s: Of decode nodes; 0: none.
        launches: What their steps with prompts are, which they plan by; None: that is not known.
        lead_s: How long before the end of a step a node decides the next one.
        overhead_s: Added to every time to the first token.
        make_fill: Makes for each engine what says which prompts its steps compute.
    """

    num_prefill: int = 16
    num_decode: int = 8
    num_routers: int = 4
    report_s: float = 0.25
    reports_on_change: bool = True
    reports_always: bool = False
    reports_prefixes: bool = True
    block_tokens: int = 512
    cache_blocks: int = 6000
    decode_kv_tokens: int = 800_000
    max_waiting_tokens: int = 0
    gate: GateLimits | None = None
    deadline_s: float = 0.0
    steps: StepTimes = field(default_factory=PrefillCost)
    batched: bool = False
    max_batched_tokens: int = 8192
    max_sequences: int = 256
    itl_objective_s: float = 0.0
    launches: StepLaunches | None = None
    lead_s: float = 0.0
    overhead_s: float = 0.0
    make_fill: Callable[[], StepFilling] = InOrderOfArrival


MakePolicy = Callable[[NodeRegistry, random.Random], Policy]


class SimCluster:
    """A cluster in virtual time. `speeds`: of the prefill nodes, 1 for an ordinary one."""

    def __init__(
        self, shape: ClusterShape, make_policy: MakePolicy, seed: int, speeds: Sequence[float] = ()
    ) -> None:
        self.timeline = VirtualTime()
        self.shape = shape
        self._coming: deque[float] = deque()
        """Times of the requests that have not come yet."""
        self.reports = Reporting(
            timeline=self.timeline,
            every_s=shape.report_s,
            on_change=shape.reports_on_change,
            always=shape.reports_always,
            coming=self._coming,
        )
        self._rng = random.Random(seed)
        self._numbers = itertools.count()
        pace = itertools.chain(speeds, itertools.repeat(1.0))
        self.prefills = [self._make_prefill(i, next(pace)) for i in range(shape.num_prefill)]
        self.decodes = [self._make_decode(i) for i in range(shape.num_decode)]
        self._prefill_at = {node.address.target: node for node in self.prefills}
        self._decode_at = {node.address.target: node for node in self.decodes}
        self.routers = [self._make_router(make_policy) for _ in range(shape.num_routers)]
        self.reports.nodes = lambda: [*self.prefills, *self.decodes]
        self.reports.routers = self.routers
        self.measured = Measured()
        self._left = 0
        self._warm_at = 0.0

    def run(
        self,
        requests: Sequence[SimRequest],
        warm_part: float = 0.15,
        batch: Sequence[SimRequest] = (),
    ) -> Measured:
        """Runs all `requests`: to their first token, or to their last if decode nodes step.
        `batch`: what runs beside them on what they leave free."""
        self._left = len(requests)
        self._coming.extend(request.at_s for request in requests)
        self._warm_at = requests[int(warm_part * len(requests))].at_s
        for request in requests:
            self.timeline.at(request.at_s, partial(self._arrive, request))
        self.reports.begin()
        if batch:
            self._begin_batch(batch)
        while self._left:
            self.timeline.step()
        return self.measured

    def _begin_batch(self, batch: Sequence[SimRequest]) -> None:
        router = self.routers[0]

        def start(request: SimRequest) -> None:
            self._left += 1
            self._offer(request, router)

        spare: SpareNodes = router.policy.spare  # type: ignore[attr-defined]
        IdleWork(
            timeline=self.timeline,
            spare=spare,
            requests=batch,
            start=start,
            goes_on=lambda: bool(self._coming),
        ).begin()

    # Nodes -------------------------------------------------------------------------------------

    def _make_prefill(self, index: int, speed: float = 1.0) -> SimPrefillNode:
        engine = self._make_engine(speed)
        node = SimPrefillNode(_address(NodeRole.PREFILL, index), self._make_cache(), engine)
        engine.begin = partial(self._begin_remote, node)
        engine.first = partial(self._first_token, node)
        engine.began = partial(self.reports.changed, node)
        return node

    def _make_decode(self, index: int) -> SimDecodeNode:
        engine = self._make_engine()
        kv_tokens = self.shape.decode_kv_tokens
        address = _address(NodeRole.DECODE, index)
        node = SimDecodeNode(address, kv_tokens, self._make_cache(), engine)
        node.steps, node.max_sequences = self.shape.batched, self.shape.max_sequences
        engine.slack = StepSlack(self.shape.itl_objective_s, self.shape.launches)
        engine.began = partial(self.reports.changed, node)
        engine.begin = partial(self._begin_local, node)
        engine.first = partial(self._first_local, node)
        engine.end = partial(self._end, node)
        return node

    def _make_engine(self, speed: float = 1.0) -> SimEngine:
        return SimEngine(
            timeline=self.timeline,
            times=self.shape.steps,
            begin=_nothing,
            first=_nothing,
            end=_nothing,
            gaps=self._gaps,
            began=lambda: None,
            max_batched_tokens=self.shape.max_batched_tokens,
            speed=speed,
            lead_s=self.shape.lead_s,
            one_prompt=not self.shape.batched,
            fill=self.shape.make_fill(),
        )

    def _make_cache(self) -> PrefixCache:
        return PrefixCache(self.shape.cache_blocks, self.shape.block_tokens)

    def _make_router(self, make_policy: MakePolicy) -> SimRouter:
        registry = NodeRegistry(clock=lambda: self.timeline.now)
        registry.set_members(self._addresses())
        rng = random.Random(self._rng.random())
        gate = AdmissionGate(
            limits=self.shape.gate or GateLimits(slots_per_node=10**9, wait_s=0),
            num_nodes=lambda: len(self.prefills) or len(self.decodes),
            clock=registry.clock,
            rng=rng,
        )
        return SimRouter(registry, make_policy(registry, rng), gate)

    def _addresses(self) -> list[NodeAddress]:
        prefills = [node.address for node in self.prefills]
        return prefills + [node.address for node in self.decodes]

    # A request ---------------------------------------------------------------------------------

    def _arrive(self, request: SimRequest) -> None:
        self._coming.popleft()
        router = self._rng.choice(self.routers)
        if self.shape.deadline_s:
            info = replace(request.info, ttft_deadline_s=self.shape.deadline_s)
            request = replace(request, info=info)
        self._offer(request, router)

    def _offer(self, request: SimRequest, router: SimRouter) -> None:
        try:
            waiting = router.gate.offer(
                request.info, lambda: self._place(request, router), lambda _: self._refuse(request)
            )
        except Overloaded:
            self._refuse(request)
            return
        if waiting and waiting.deadline < math.inf:
            self.timeline.at(waiting.deadline, lambda: self._give_up(waiting, request, router))

    def _give_up(self, waiting: Waiting, request: SimRequest, router: SimRouter) -> None:
        if waiting in router.gate.line:
            router.gate.too_late(waiting)
            self._refuse(request)

    def _refuse(self, request: SimRequest) -> None:
        self._left -= 1
        self.measured.num_refused += self._counts(request)

    def _place(self, request: SimRequest, router: SimRouter) -> None:
        began = time.perf_counter()
        try:
            placement = router.policy.place(request.info)
        except NoNodeAvailable:
            # Nodes are always there: those for what only uses what others leave free are not.
            self.timeline.at(self.timeline.now, router.gate.free)
            self._refuse(request)
            return
        took_s = time.perf_counter() - began
        try:
            router.gate.check_placement(request.info, placement, self.timeline.now - request.at_s)
        except Overloaded:
            self.timeline.at(self.timeline.now, router.gate.free)
            self._refuse(request)
            return
        job = Job(request, router, placement)
        job.prefill_work.enter_context(placement.hold_prefill())
        job.decode_work.enter_context(placement.hold_decode())
        if self._counts(request):
            self.measured.decision_s.append(took_s)
            self.measured.choices[str(placement.choice)] += 1
        decode = self._decode_at[placement.decode.address.target]
        if self.shape.batched:
            decode.pending.append(job)
            self._start_pending(decode)
        else:
            self._start_prefill(job, decode)

    def _counts(self, request: SimRequest) -> bool:
        return request.at_s >= self._warm_at and not request.info.is_idle_class

    def _start_pending(self, decode: SimDecodeNode) -> None:
        """Starts what the decode node has room for, in order of arrival. A request that would not
        even fit into an empty one has to fit, too."""
        while decode.pending:
            job = decode.pending[0]
            full = decode.used_tokens + job.num_held > decode.kv_tokens
            if decode.num_running and (full or decode.num_running >= self.shape.max_sequences):
                return
            decode.pending.popleft()
            decode.used_tokens += job.num_held
            decode.num_running += 1
            decode.num_idle += job.is_idle_class
            self._start_prefill(job, decode)

    def _start_prefill(self, job: Job, decode: SimDecodeNode) -> None:
        if job.placement.prefills:
            self._enqueue(self._accepting_node(job), job)
        else:
            self._look_up(decode.cache, job)
            decode.engine.add_prompt(job)

    def _accepting_node(self, job: Job) -> SimPrefillNode:
        """Returns the first of the list that does not refuse, or the last."""
        ranked = [self._prefill_at[node.address.target] for node in job.placement.prefills]
        limit = self.shape.max_waiting_tokens
        while limit and len(ranked) > 1 and ranked[0].num_waiting_tokens >= limit:
            refusing = ranked.pop(0)
            job.refused_by += (refusing.address.target,)
            self.measured.num_full += 1
            self.reports.changed(refusing)
        return ranked[0]

    def _enqueue(self, node: SimPrefillNode, job: Job) -> None:
        node.num_waiting_tokens += job.request.num_prompt
        self._look_up(node.cache, job)
        node.engine.add_prompt(job)
        self.reports.changed(node)

    def _begin_remote(self, node: SimPrefillNode, job: Job) -> None:
        self._look_up(node.cache, job)
        node.num_waiting_tokens -= job.num_cached

    def _begin_local(self, node: SimDecodeNode, job: Job) -> None:
        self._look_up(node.cache, job)

    def _look_up(self, cache: PrefixCache, job: Job) -> None:
        num_prompt = job.request.num_prompt
        job.num_cached = min(cache.cached_tokens(job.request.blocks), num_prompt - 1)
        job.num_left = num_prompt - job.num_cached

    def _first_token(self, node: SimPrefillNode, job: Job) -> None:
        request, new = job.request, job.request.num_prompt - job.num_cached
        job.first_at = self.timeline.now
        node.num_waiting_tokens -= new
        node.computed += new
        node.cache.keep(request.blocks)
        if self.shape.reports_prefixes:
            node.new_prefixes += request.info.prefix_blocks[-1:]
        job.prefill_work.close()
        job.router.gate.free()
        self._decode(job)
        job.router.policy.observe(request.info, job.placement, self._outcome(node, job))
        self._measure_first(job)

    def _first_local(self, node: SimDecodeNode, job: Job) -> None:
        job.first_at = self.timeline.now
        job.prefill_work.close()
        node.cache.keep(job.request.blocks)
        job.router.gate.free()
        self._decode(job)
        self._measure_first(job)

    def _measure_first(self, job: Job) -> None:
        if self._counts(job.request):
            ttft_s = self.timeline.now - job.request.at_s + self.shape.overhead_s
            self.measured.ttft_s.append(ttft_s)
            self.measured.num_cached += job.num_cached
            self.measured.num_prompt += job.request.num_prompt

    def _outcome(self, node: SimPrefillNode, job: Job) -> PrefillOutcome:
        return PrefillOutcome(
            node=node.address.target,
            num_prompt_tokens=job.request.num_prompt,
            num_cached_tokens=job.num_cached,
            queue_s=job.started_at - job.request.at_s,
            compute_s=self.timeline.now - job.started_at,
            failures=tuple((target, "resource_exhausted") for target in job.refused_by),
        )

    def _decode(self, job: Job) -> None:
        node = self._decode_at[job.placement.decode.address.target]
        if self.shape.batched:
            if job.request.num_output > 1:
                node.engine.join(job)
            else:
                self._end(node, job)
            return
        self._left -= 1
        self.measured.num_overfull += node.used_tokens + job.num_held > node.kv_tokens
        node.used_tokens += job.num_held
        node.num_running += 1
        node.num_idle += job.is_idle_class
        pace_s = self.shape.steps.decode_s(1, 0)
        self.timeline.at(
            self.timeline.now + job.request.num_output * pace_s, lambda: self._leave(node, job)
        )

    def _end(self, node: SimDecodeNode, job: Job) -> None:
        request = job.request
        self._left -= 1
        self._leave(node, job)
        if job.is_idle_class:
            self.measured.num_batch += 1
            self.measured.num_batch_tokens += request.num_prompt + request.num_output
        job.router.policy.finished(request.info, request.num_output)
        if self._counts(request):
            ttft_s = job.first_at - request.at_s + self.shape.overhead_s
            gaps = max(1, request.num_output - 1)
            mean_gap_s = (self.timeline.now - job.first_at) / gaps
            self.measured.answers.append((request.at_s, ttft_s, mean_gap_s))
            self.measured.num_output += request.num_output
        self._start_pending(node)

    def _leave(self, node: SimDecodeNode, job: Job) -> None:
        node.used_tokens -= job.num_held
        node.num_running -= 1
        node.num_idle -= job.is_idle_class
        job.decode_work.close()

    def _gaps(self, job: Job | None, seconds: float, count: float) -> None:
        if self.timeline.now >= self._warm_at:
            self.measured.gaps.append((seconds, count))


def _nothing(job: Job) -> None:
    """Is replaced by what the node does."""


def _address(role: NodeRole, index: int) -> NodeAddress:
    target = f"10.{0 if role is NodeRole.PREFILL else 1}.{index >> 8}.{index & 255}:5001"
    return NodeAddress(role, target, target)
