"""One start of one node, as this router sees it: its last report and our own work on it.

    1. joining   discovery named it; no report yet, so it gets no requests
    2. ready     reports arrive
    3. suspect   reports are late, the stream broke, or its engine stands still:
                 used only when no node of the tier is ready
    4. draining  it said that it stops: finishes what it has, gets nothing new
    5. ejected   it failed several requests in a row (`router.health`)
    6. down      silent for long: not used at all

A node that restarts (another epoch) is a new `Node` at the same address; requests in flight keep
the old one, so their bookkeeping cannot touch the new.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from router.health import Health
from router.node_address import NodeAddress
from router.node_report import NodeReport
from router.session import node_hash_seed


class NodeState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    EJECTED = "ejected"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a node may be silent, in seconds."""

    stale_after_s: float = 3.0
    down_after_s: float = 10.0
    stall_after_s: float = 10.0


@dataclass(slots=True)
class OwnWork:
    """What this router has put on a node and is not over. `recent_*` is the part since the node's
    last report, which therefore cannot contain it yet."""

    num_requests: int = 0
    num_tokens: int = 0
    recent_requests: int = 0
    recent_tokens: int = 0

    def forget_recent(self) -> None:
        self.recent_requests = 0
        self.recent_tokens = 0


@dataclass(slots=True, eq=False)
class Node:
    address: NodeAddress
    retired_epochs: tuple[int, ...] = ()
    report: NodeReport | None = None
    reported_at: float = -1.0
    connected: bool = False
    health: Health = field(default_factory=Health)
    work: OwnWork = field(default_factory=OwnWork)
    hash_seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.hash_seed = node_hash_seed(self.address.target)

    def state(self, now: float, patience: Patience) -> NodeState:
        report = self.report
        if report is None:
            return NodeState.JOINING
        silent_s = now - self.reported_at
        if silent_s > patience.down_after_s:
            return NodeState.DOWN
        if report.draining:
            return NodeState.DRAINING
        if self.health.is_ejected(now):
            return NodeState.EJECTED
        stalled = report.seconds_since_progress > patience.stall_after_s
        if not self.connected or silent_s > patience.stale_after_s or stalled:
            return NodeState.SUSPECT
        return NodeState.READY

    def apply(self, report: NodeReport, now: float) -> None:
        self.report = report
        self.reported_at = now
        self.connected = True
        self.work.forget_recent()

    @property
    def predicted_requests(self) -> int:
        """Requests on the node, counting those of ours that its report cannot know yet."""
        reported = self.report.num_requests if self.report else 0
        return max(reported + self.work.recent_requests, self.work.num_requests)

    @property
    def predicted_tokens(self) -> int:
        """Prompt tokens the node has yet to compute, counted likewise."""
        reported = self.report.num_waiting_tokens if self.report else 0
        return max(reported + self.work.recent_tokens, self.work.num_tokens)

    @contextmanager
    def hold_request(self) -> Iterator[None]:
        """One request of ours is on the node as long as this is open."""
        self.work.num_requests += 1
        self.work.recent_requests += 1
        known_at = self.reported_at
        try:
            yield
        finally:
            self.work.num_requests -= 1
            if self.reported_at == known_at:
                self.work.recent_requests -= 1

    @contextmanager
    def hold_tokens(self, num_tokens: int) -> Iterator[None]:
        """So many prompt tokens of ours wait on the node as long as this is open."""
        self.work.num_tokens += num_tokens
        self.work.recent_tokens += num_tokens
        known_at = self.reported_at
        try:
            yield
        finally:
            self.work.num_tokens -= num_tokens
            if self.reported_at == known_at:
                self.work.recent_tokens -= num_tokens
