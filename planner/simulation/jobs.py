"""Follows one request through the simulated cluster."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from planner.simulation.requests import SimRequest
from router.admission.admission_gate import AdmissionGate
from router.nodes.registry import NodeRegistry
from router.placement.policy import Placement, Policy


@dataclass(slots=True, eq=False)
class SimRouter:
    registry: NodeRegistry
    policy: Policy
    gate: AdmissionGate


@dataclass(slots=True, eq=False)
class Job:
    """Is a placed request. Times are virtual seconds.

    Attributes:
        num_left: Prompt tokens that are still to be computed.
        came_at: When its prompt came to its engine.
        started_at, first_at: When its prompt was begun, and when its first token was there.
        last_step: The number of its engine's step that brings its last token.
    """

    request: SimRequest
    router: SimRouter
    placement: Placement
    prefill_work: ExitStack = field(default_factory=ExitStack)
    decode_work: ExitStack = field(default_factory=ExitStack)
    refused_by: tuple[str, ...] = ()
    num_cached: int = 0
    num_left: int = 0
    came_at: float = 0.0
    started_at: float = 0.0
    first_at: float = 0.0
    last_step: int = 0
    is_idle_class: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_idle_class = self.request.info.is_idle_class

    @property
    def num_before(self) -> int:
        """Returns the prompt tokens that have KV."""
        return self.request.num_prompt - self.num_left

    @property
    def num_held(self) -> int:
        """Returns the tokens whose KV the decode node holds in the end."""
        return self.request.num_prompt + self.request.num_output
