"""Keeps a gate for each model, because a line in which all wait would let one model's flood starve
the others: nodes of one cannot serve what waits for another.

Each model has slots for its own nodes, and a line and a pace of its own. What a tenant may use, it
may use of all models together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from router.admission.admission_gate import AdmissionGate, GateLimits
from router.admission.retry_after import RetryAfter
from router.admission.tenant_limits import TenantLimits
from router.models.per_model import PerModel
from router.request.info import RequestInfo


@dataclass(slots=True, kw_only=True)
class ModelGates:
    """Makes gates. `num_nodes` counts the nodes that compute prompts of a model."""

    limits: GateLimits
    num_nodes: Callable[[str], int]
    clock: Callable[[], float]
    rng: random.Random
    on_request: Callable[[RequestInfo], None] = lambda request: None
    _retry_after: RetryAfter = field(init=False)
    _tenants: TenantLimits = field(init=False)
    _gates: PerModel[AdmissionGate] = field(init=False)

    def __post_init__(self) -> None:
        self._retry_after = RetryAfter(self.rng)
        self._tenants = TenantLimits(
            retry_after=self._retry_after, num_routers=self.limits.num_routers
        )
        self._gates = PerModel(self._make, is_used=lambda gate: gate.is_used)

    def of(self, model: str) -> AdmissionGate:
        return self._gates.of(model)

    def known(self, model: str) -> AdmissionGate | None:
        """Returns the gate of a model that was asked for before."""
        return self._gates.get(model)

    def retry_after_s(self) -> int:
        """Returns when something should come back whose model is not known yet."""
        return self._retry_after.seconds(max((gate.drain_s() for gate in self._gates), default=0))

    def _make(self, model: str) -> AdmissionGate:
        return AdmissionGate(
            limits=self.limits,
            num_nodes=lambda: self.num_nodes(model),
            clock=self.clock,
            rng=self.rng,
            tenants=self._tenants,
            on_request=self.on_request,
        )
