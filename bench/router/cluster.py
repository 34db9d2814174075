"""A cluster in virtual time: routers that run the router's own code, nodes that only count.

    arrival ──▶ a router places it ──▶ prefill node: queue, then service ──▶ first token
                     ▲                        │                                  │
                     └── load reports ◀───────┘         decode node: KV until the last token

A prefill node serves one prompt after the other; its prefix cache holds the most recent blocks.
Reports reach every router each `report_s`, and 20 ms after a prompt enters or leaves a node; they
tell of the prompts computed since the last one, as real nodes do.
Routers share nothing: each has its own registry, index, and measurements.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from bench.router.requests import BLOCK_TOKENS, SimRequest
from router.admission.admission_gate import AdmissionGate, GateLimits
from router.admission.waiting_line import Waiting
from router.errors import Overloaded
from router.nodes.address import NodeAddress, NodeRole
from router.nodes.registry import NodeRegistry
from router.nodes.report import NodeReport
from router.placement.policy import Placement, Policy
from router.placement.prefill_outcome import PrefillOutcome

_CHANGE_DELAY_S = 0.02
_TOKEN_S = 0.025
_KV_BLOCK = 16


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of one prompt: 8000 tokens a second, and attention."""

    base_s: float = 0.02
    per_token_s: float = 1 / 8000
    per_pair_s: float = 0.5e-9

    def seconds(self, num_new: int, num_prompt: int) -> float:
        return self.base_s + num_new * (self.per_token_s + self.per_pair_s * num_prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    num_prefill: int = 16
    num_decode: int = 8
    num_routers: int = 4
    report_s: float = 0.25
    reports_on_change: bool = True
    reports_prefixes: bool = True
    cache_blocks: int = 6000
    decode_kv_tokens: int = 800_000
    max_waiting_tokens: int = 0
    """A prefill node with more refuses; 0: none does."""
    gate: GateLimits | None = None
    """Admission at the routers; None: everybody is admitted."""
    deadline_s: float = 0.0
    """That requests name; 0: none."""
    cost: PrefillCost = PrefillCost()


@dataclass(slots=True)
class _Job:
    request: SimRequest
    router: SimRouter
    placement: Placement
    prefill_work: ExitStack
    decode_work: ExitStack
    refused_by: tuple[str, ...] = ()
    num_cached: int = 0
    started_at: float = 0.0


@dataclass(slots=True, eq=False)
class SimPrefillNode:
    address: NodeAddress
    speed: float
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    queue: deque[_Job] = field(default_factory=deque)
    running: _Job | None = None
    num_waiting_tokens: int = 0
    busy_s: float = 0.0
    sequence: int = 0
    computed: int = 0
    compute_s: float = 0.0
    new_prefixes: list[int] = field(default_factory=list)

    def cached_tokens(self, blocks: Sequence[int]) -> int:
        known = itertools.takewhile(self.cache.__contains__, blocks)
        return BLOCK_TOKENS * sum(1 for _ in known)

    def keep(self, blocks: Sequence[int], capacity: int) -> None:
        """Keeps the blocks of a chain, whose end goes first."""
        for block in reversed(blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > capacity:
            self.cache.popitem(last=False)

    def report(self, capacity: int) -> NodeReport:
        self.sequence += 1
        prefixes, self.new_prefixes = tuple(self.new_prefixes), []
        return NodeReport(
            node_id=self.address.target,
            role=NodeRole.PREFILL,
            recent_prefixes=prefixes,
            epoch=1,
            sequence=self.sequence,
            num_waiting_requests=len(self.queue),
            num_running_requests=int(self.running is not None),
            num_waiting_tokens=self.num_waiting_tokens,
            num_free_blocks=capacity * BLOCK_TOKENS // _KV_BLOCK,
            num_total_blocks=capacity * BLOCK_TOKENS // _KV_BLOCK,
            block_size=_KV_BLOCK,
            prefill_tokens_per_s=self.computed / self.compute_s if self.compute_s else 0.0,
            model_name="m",
            fingerprint="f",
        )


@dataclass(slots=True, eq=False)
class SimDecodeNode:
    address: NodeAddress
    kv_tokens: int
    used_tokens: int = 0
    num_running: int = 0
    sequence: int = 0

    def report(self) -> NodeReport:
        self.sequence += 1
        total = self.kv_tokens // _KV_BLOCK
        return NodeReport(
            node_id=self.address.target,
            role=NodeRole.DECODE,
            epoch=1,
            sequence=self.sequence,
            num_running_requests=self.num_running,
            num_free_blocks=max(0, total - self.used_tokens // _KV_BLOCK),
            num_total_blocks=total,
            block_size=_KV_BLOCK,
            model_name="m",
            fingerprint="f",
        )


@dataclass(slots=True, eq=False)
class SimRouter:
    registry: NodeRegistry
    policy: Policy
    gate: AdmissionGate


@dataclass(slots=True, kw_only=True)
class Measured:
    """Figures of the requests after the warm-up. Seconds; tokens."""

    ttft_s: list[float] = field(default_factory=list)
    decision_s: list[float] = field(default_factory=list)
    choices: dict[str, int] = field(default_factory=dict)
    num_cached: int = 0
    num_prompt: int = 0
    num_full: int = 0
    """Prompts that a prefill node was too full for."""
    num_refused: int = 0
    """Requests that a router refused."""
    num_overfull: int = 0
    """Requests that a decode node had no KV left for."""


MakePolicy = Callable[[NodeRegistry, random.Random], Policy]


class SimCluster:
    """A cluster in virtual time. `speeds`: of the prefill nodes, 1 for an ordinary one."""

    def __init__(
        self, shape: ClusterShape, make_policy: MakePolicy, seed: int, speeds: Sequence[float] = ()
    ) -> None:
        self.now = 0.0
        self._shape = shape
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        pace = itertools.chain(speeds, itertools.repeat(1.0))
        self.prefills = [
            SimPrefillNode(_address(NodeRole.PREFILL, i), next(pace))
            for i in range(shape.num_prefill)
        ]
        self.decodes = [
            SimDecodeNode(_address(NodeRole.DECODE, i), shape.decode_kv_tokens)
            for i in range(shape.num_decode)
        ]
        self._by_target = {node.address.target: node for node in self.prefills}
        self._decode_by_target = {node.address.target: node for node in self.decodes}
        self.routers = [self._make_router(make_policy) for _ in range(shape.num_routers)]
        self.measured = Measured()
        self._left = 0
        self._warm_at = 0.0

    def run(self, requests: Sequence[SimRequest], warm_part: float = 0.15) -> Measured:
        """Runs all `requests` to their first token."""
        self._left = len(requests)
        self._warm_at = requests[int(warm_part * len(requests))].at_s
        for request in requests:
            self._at(request.at_s, lambda request=request: self._arrive(request))
        self._report_all()
        while self._left:
            self.now, _, action = heapq.heappop(self._events)
            action()
        return self.measured

    def _make_router(self, make_policy: MakePolicy) -> SimRouter:
        registry = NodeRegistry(clock=lambda: self.now)
        registry.set_members(node.address for node in (*self.prefills, *self.decodes))
        rng = random.Random(self._rng.random())
        gate = AdmissionGate(
            limits=self._shape.gate or GateLimits(slots_per_node=10**9, wait_s=0),
            num_nodes=lambda: self._shape.num_prefill,
            clock=registry.clock,
            rng=rng,
        )
        return SimRouter(registry, make_policy(registry, rng), gate)

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._serial), action))

    # Reports -----------------------------------------------------------------------------------

    def _report_all(self) -> None:
        for node in self.prefills:
            self._tell(node.address, node.report(self._shape.cache_blocks))
        for decode in self.decodes:
            self._tell(decode.address, decode.report())
        self._at(self.now + self._shape.report_s, self._report_all)

    def _changed(self, node: SimPrefillNode) -> None:
        if self._shape.reports_on_change:
            report = node.report(self._shape.cache_blocks)
            self._at(self.now + _CHANGE_DELAY_S, lambda: self._tell(node.address, report))

    def _tell(self, address: NodeAddress, report: NodeReport) -> None:
        for router in self.routers:
            router.registry.take_report(address, report)

    # A request ---------------------------------------------------------------------------------

    def _arrive(self, request: SimRequest) -> None:
        router = self._rng.choice(self.routers)
        if self._shape.deadline_s:
            info = replace(request.info, ttft_deadline_s=self._shape.deadline_s)
            request = replace(request, info=info)
        try:
            waiting = router.gate.offer(request.info, lambda: self._place(request, router))
        except Overloaded:
            self._refuse(request)
            return
        if waiting is not None and waiting.deadline < math.inf:
            self._at(waiting.deadline, lambda: self._give_up(waiting, request, router))

    def _give_up(self, waiting: Waiting, request: SimRequest, router: SimRouter) -> None:
        if waiting in router.gate.line:
            router.gate.too_late(waiting)
            self._refuse(request)

    def _refuse(self, request: SimRequest) -> None:
        self._left -= 1
        self.measured.num_refused += self._counts(request)

    def _place(self, request: SimRequest, router: SimRouter) -> None:
        began = time.perf_counter()
        placement = router.policy.place(request.info)
        took_s = time.perf_counter() - began
        try:
            router.gate.check_placement(request.info, placement, self.now - request.at_s)
        except Overloaded:
            self._at(self.now, router.gate.free)
            self._refuse(request)
            return
        job = _Job(request, router, placement, ExitStack(), ExitStack())
        job.prefill_work.enter_context(placement.hold_prefill())
        job.decode_work.enter_context(placement.hold_decode())
        if self._counts(request):
            self.measured.decision_s.append(took_s)
            name = str(placement.choice)
            self.measured.choices[name] = self.measured.choices.get(name, 0) + 1
        self._enqueue(self._accepting_node(job), job)

    def _counts(self, request: SimRequest) -> bool:
        return request.at_s >= self._warm_at

    def _accepting_node(self, job: _Job) -> SimPrefillNode:
        """Returns the first of the list that does not refuse, or the last."""
        ranked = [self._by_target[node.address.target] for node in job.placement.prefills]
        limit = self._shape.max_waiting_tokens
        while limit and len(ranked) > 1 and ranked[0].num_waiting_tokens >= limit:
            refusing = ranked.pop(0)
            job.refused_by += (refusing.address.target,)
            self.measured.num_full += 1
            self._changed(refusing)
        return ranked[0]

    def _enqueue(self, node: SimPrefillNode, job: _Job) -> None:
        node.num_waiting_tokens += job.request.num_prompt
        node.queue.append(job)
        if node.running is None:
            self._start_next(node)
        self._changed(node)

    def _start_next(self, node: SimPrefillNode) -> None:
        if not node.queue:
            return
        job = node.running = node.queue.popleft()
        request = job.request
        job.started_at = self.now
        job.num_cached = min(node.cached_tokens(request.blocks), request.num_prompt - 1)
        node.num_waiting_tokens -= job.num_cached
        new = request.num_prompt - job.num_cached
        service_s = self._shape.cost.seconds(new, request.num_prompt) / node.speed
        node.busy_s += service_s
        self._at(self.now + service_s, lambda: self._first_token(node, job))

    def _first_token(self, node: SimPrefillNode, job: _Job) -> None:
        request, new = job.request, job.request.num_prompt - job.num_cached
        node.num_waiting_tokens -= new
        node.computed += new
        node.compute_s += self.now - job.started_at
        node.running = None
        node.keep(request.blocks, self._shape.cache_blocks)
        if self._shape.reports_prefixes:
            node.new_prefixes += request.info.prefix_blocks[-1:]
        job.prefill_work.close()
        job.router.gate.free()
        self._start_decoding(job)
        job.router.policy.observe(request.info, job.placement, self._outcome(node, job))
        self._left -= 1
        if self._counts(request):
            self.measured.ttft_s.append(self.now - request.at_s)
            self.measured.num_cached += job.num_cached
            self.measured.num_prompt += request.num_prompt
        self._start_next(node)
        self._changed(node)

    def _outcome(self, node: SimPrefillNode, job: _Job) -> PrefillOutcome:
        return PrefillOutcome(
            node=node.address.target,
            num_prompt_tokens=job.request.num_prompt,
            num_cached_tokens=job.num_cached,
            queue_s=job.started_at - job.request.at_s,
            compute_s=self.now - job.started_at,
            failures=tuple((target, "resource_exhausted") for target in job.refused_by),
        )

    def _start_decoding(self, job: _Job) -> None:
        node = self._decode_by_target[job.placement.decode.address.target]
        held = job.request.num_prompt + job.request.num_output
        self.measured.num_overfull += node.used_tokens + held > node.kv_tokens
        node.used_tokens += held
        node.num_running += 1

        def end() -> None:
            node.used_tokens -= held
            node.num_running -= 1
            job.decode_work.close()

        self._at(self.now + job.request.num_output * _TOKEN_S, end)


def _address(role: NodeRole, index: int) -> NodeAddress:
    target = f"10.{0 if role is NodeRole.PREFILL else 1}.{index >> 8}.{index & 255}:5001"
    return NodeAddress(role, target, target)
