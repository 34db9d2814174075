"""Holds one start of one node, as this router sees it: its last report and our own work on it.

    1. joining    discovery named it; no report yet, so it gets no requests
    -  elsewhere  it reports, and is another entry of the node list, where it counts
    2. ready      reports arrive
    3. suspect    reports are late, the stream broke, or its engine stands still:
                  used only when no node of the tier is ready
    -  leaving    Kubernetes ends its pod, which still serves: likewise
    4. draining   it said that it stops: finishes what it has, gets nothing new
    -  drained    an operator has taken it out of use: likewise, until another call takes it back
    5. ejected    it failed several requests in a row (`router.nodes.health`)
    6. half-open  an ejection is over: one request at a time, until one succeeds
    7. down       silent for long: not used at all

A node that restarts (another epoch) is a new `Node` at the same address; requests in flight keep
the old one, so their bookkeeping cannot touch the new. So is one that has changed its role: what
the node list says of it stays its `listed` address, `address` is where it serves now.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from edge.adapter_call import AdapterCall
from router.nodes.adapter_set import NO_ADAPTERS, AdapterSet
from router.nodes.address import NodeAddress, NodeRole
from router.nodes.health import Health
from router.nodes.pace import Pace
from router.nodes.report import NodeReport
from router.nodes.session import node_hash_seed


class NodeState(StrEnum):
    JOINING = "joining"
    ELSEWHERE = "elsewhere"
    READY = "ready"
    SUSPECT = "suspect"
    LEAVING = "leaving"
    DRAINING = "draining"
    DRAINED = "drained"
    EJECTED = "ejected"
    HALF_OPEN = "half_open"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Says how long a node may be silent, in seconds."""

    stale_after_s: float = 3.0
    down_after_s: float = 10.0
    stall_after_s: float = 10.0


@dataclass(slots=True)
class OwnWork:
    """Counts what this router has put on a node and is not over. `recent_*` is the part since the
    node's last report, which therefore cannot contain it yet. `tokens` are of prompts, on a prefill
    node; `kv_tokens` are those that requests will hold in the end, on a decode node. `idle_*` are
    of the idle class, which uses what no other does; others set `was_used`, and with a prompt to
    compute `had_prompt`, until the next look."""

    num_requests: int = 0
    num_tokens: int = 0
    recent_requests: int = 0
    recent_tokens: int = 0
    recent_kv_tokens: int = 0
    idle_requests: int = 0
    idle_prompts: int = 0
    idle_tokens: int = 0
    was_used: bool = False
    had_prompt: bool = False
    recent_pulls: dict[str, list[int]] = field(default_factory=dict)
    """Prompt tokens whose KV it will pull, by the prefill node's `host:port`."""

    def note_pull(self, prefill: Node, num_tokens: int) -> None:
        self.recent_pulls.setdefault(prefill.address.target, []).append(num_tokens)

    def forget_recent(self) -> None:
        self.recent_requests = 0
        self.recent_tokens = 0
        self.recent_kv_tokens = 0
        self.recent_pulls.clear()


@dataclass(slots=True, eq=False)
class Node:
    address: NodeAddress
    retired_epochs: tuple[int, ...] = ()
    report: NodeReport | None = None
    reported_at: float = -1.0
    connected: bool = False
    leaving: bool = False
    health: Health = field(default_factory=Health)
    work: OwnWork = field(default_factory=OwnWork)
    pace: Pace = field(default_factory=Pace)
    followed: dict[str, AdapterCall] = field(default_factory=dict)
    """The newest call about each adapter that the node says it has followed, by name; what it said
    last stands last."""
    num_followed: int = 0
    """How many it has said in all."""
    lacks_adapters: bool = False
    """It has had more than its reports may tell."""
    listed_as: NodeAddress | None = None
    """Its address in the node list, if that is not where it serves."""
    counts_at: NodeAddress | None = None
    """The entry of the node list that its reports are for, if that is another one."""
    hash_seed: int = field(init=False)

    @property
    def listed(self) -> NodeAddress:
        """Returns its address in the node list."""
        return self.listed_as or self.address

    def __post_init__(self) -> None:
        self.hash_seed = node_hash_seed(self.address.target)

    def state(self, now: float, patience: Patience) -> NodeState:
        report = self.report
        if report is None:
            return NodeState.ELSEWHERE if self.counts_at else NodeState.JOINING
        silent_s = now - self.reported_at
        if silent_s > patience.down_after_s:
            return NodeState.DOWN
        if report.draining:
            return NodeState.DRAINED if report.drained else NodeState.DRAINING
        if self.health.is_ejected(now):
            return NodeState.EJECTED
        stalled = report.seconds_since_progress > patience.stall_after_s
        if not self.connected or silent_s > patience.stale_after_s or stalled:
            return NodeState.SUSPECT
        if self.leaving:
            return NodeState.LEAVING
        return NodeState.HALF_OPEN if self.health.half_open else NodeState.READY

    def apply(self, report: NodeReport, now: float) -> None:
        self.report = report
        self.counts_at = None
        self.reported_at = now
        self.connected = True
        self.work.forget_recent()
        for call in report.adapter_calls:
            self.followed.pop(call.name, None)
            self.followed[call.name] = call
        self.num_followed += len(report.adapter_calls)

    @property
    def fingerprint(self) -> str:
        """Is equal for nodes whose KV fits together; empty before the first report."""
        return self.report.fingerprint if self.report else ""

    @property
    def model(self) -> str:
        """Returns the first name of the model it serves; empty before the first report."""
        return self.report.model_name if self.report else ""

    @property
    def names(self) -> tuple[str, ...]:
        """Returns all names of that model; none before the first report."""
        return self.report.model_names if self.report else ()

    @property
    def adapters(self) -> AdapterSet:
        """Returns the adapters that requests may name there."""
        return self.report.adapters if self.report else NO_ADAPTERS

    def has_weights(self, digest: str) -> bool:
        """Returns whether it has an adapter of these weights, by whatever name."""
        return digest in self.adapters.digests

    @property
    def predicted_requests(self) -> int:
        """Returns the requests on the node, with those of ours that its report cannot know yet."""
        reported = self.report.num_requests if self.report else 0
        return max(reported + self.work.recent_requests, self.work.num_requests)

    @property
    def predicted_tokens(self) -> int:
        """Returns the prompt tokens that the node has yet to compute, counted likewise."""
        report, work = self.report, self.work
        expected = work.recent_tokens + (report.num_waiting_tokens if report is not None else 0)
        return expected if expected > work.num_tokens else work.num_tokens

    def kv_usage_with(self, num_tokens: int) -> float:
        """Returns the part of the KV cache that will be in use with `num_tokens` more, counted
        likewise; above 1 when it is more than fits. 0 for a node that has not reported its size."""
        report = self.report
        if report is None or report.num_kv_tokens == 0:
            return 0.0
        return report.kv_usage + (self.work.recent_kv_tokens + num_tokens) / report.num_kv_tokens

    @property
    def serves_others(self) -> bool:
        """Returns whether it has work besides that of the idle class. What is on its way is in no
        report yet."""
        work, report = self.work, self.report
        if report is None or work.was_used or work.num_tokens > work.idle_tokens:
            return True
        is_prefill = self.address.role is NodeRole.PREFILL
        own_idle = work.idle_prompts if is_prefill else work.idle_requests
        of_others = work.num_requests - work.idle_requests
        return of_others > 0 or report.num_requests > max(report.num_idle_requests, own_idle)

    @contextmanager
    def hold_request(self, num_kv_tokens: int = 0, *, is_idle: bool = False) -> Iterator[None]:
        """Counts one request of ours on the node as long as this is open."""
        work, known_at = self.work, self.reported_at
        work.num_requests += 1
        work.idle_requests += is_idle
        work.was_used |= not is_idle
        work.recent_requests += 1
        work.recent_kv_tokens += num_kv_tokens
        try:
            with self.health.hold_probe():
                yield
        finally:
            work.num_requests -= 1
            work.idle_requests -= is_idle
            if self.reported_at == known_at:
                work.recent_requests -= 1
                work.recent_kv_tokens -= num_kv_tokens

    @contextmanager
    def hold_tokens(self, num_tokens: int, *, is_idle: bool = False) -> Iterator[None]:
        """Counts this many prompt tokens of ours on the node as long as this is open."""
        work, known_at = self.work, self.reported_at
        work.idle_prompts += is_idle
        work.idle_tokens += num_tokens * is_idle
        work.was_used |= not is_idle
        work.had_prompt |= not is_idle
        work.num_tokens += num_tokens
        work.recent_tokens += num_tokens
        try:
            with self.health.hold_probe():
                yield
        finally:
            work.num_tokens -= num_tokens
            work.idle_prompts -= is_idle
            work.idle_tokens -= num_tokens * is_idle
            if self.reported_at == known_at:
                work.recent_tokens -= num_tokens
