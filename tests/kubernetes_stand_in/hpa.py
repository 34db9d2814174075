"""Computes how many replicas Kubernetes' HorizontalPodAutoscaler wants (autoscaling/v2).

    each metric ──▶ replicas that bring it to its target ──▶ the most of them
      ──▶ stabilised over a window ──▶ bounded by the policies ──▶ bounded by min and max

As kube-controller-manager does it, with its defaults: a ratio within a tenth of 1 changes nothing;
a metric that cannot be read forbids to scale down; with none that can, nothing changes. Time is
what the caller says it is, so that hours can be simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

SYNC_PERIOD_S = 15.0
_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """Allows at most `value` pods, or per cent of them, in each `period_s`."""

    type: Literal["Pods", "Percent"]
    value: int
    period_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """Bounds one direction. `stabilization_s`: how long a recommendation counts. Without policies
    there is no limit."""

    stabilization_s: float
    policies: tuple[ScalingPolicy, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerSpec:
    """Holds what an autoscaler was told. The defaults are those of Kubernetes."""

    min_replicas: int
    max_replicas: int
    scale_up: ScalingRules = ScalingRules(
        stabilization_s=0.0,
        policies=(ScalingPolicy("Pods", 4, 15.0), ScalingPolicy("Percent", 100, 15.0)),
    )
    scale_down: ScalingRules = ScalingRules(
        stabilization_s=300.0, policies=(ScalingPolicy("Percent", 100, 15.0),)
    )


@dataclass(frozen=True, slots=True)
class AverageValue:
    """Holds a metric: its sum over all pods, and the target for each. `total` None: it cannot be
    read."""

    total: float | None
    target: float

    def replicas(self, current: int) -> int | None:
        if self.total is None:
            return None
        if abs(self.total / (self.target * current) - 1.0) <= _TOLERANCE:
            return current
        return math.ceil(self.total / self.target)


@dataclass(slots=True)
class HorizontalPodAutoscaler:
    """Remembers its recommendations and what it changed. `desire` is asked every 15 seconds."""

    spec: AutoscalerSpec
    _recommended: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def desire(self, now_s: float, current: int, metrics: Sequence[AverageValue]) -> int:
        """Returns the replicas to set; 0 is left alone, as it turns autoscaling off."""
        low, high = self.spec.min_replicas, self.spec.max_replicas
        if current == 0:
            return 0
        if not low <= current <= high:
            wanted = min(max(current, low), high)
        else:
            wanted = self._bounded(now_s, current, self._stabilised(now_s, current, metrics))
        if wanted != current:
            self._changes.append((now_s, wanted - current))
        return wanted

    def _stabilised(self, now_s: float, current: int, metrics: Sequence[AverageValue]) -> int:
        found = [metric.replicas(current) for metric in metrics]
        known = [count for count in found if count is not None]
        raw = max(known, default=current)
        if len(known) < len(found):
            raw = max(raw, current)
        up, down = self.spec.scale_up.stabilization_s, self.spec.scale_down.stabilization_s
        self._recommended = [
            (at, count) for at, count in self._recommended if at > now_s - max(up, down)
        ]
        lowest = min([raw, *(c for at, c in self._recommended if at > now_s - up)])
        highest = max([raw, *(c for at, c in self._recommended if at > now_s - down)])
        self._recommended.append((now_s, raw))
        return min(max(current, lowest), highest)

    def _bounded(self, now_s: float, current: int, wanted: int) -> int:
        if wanted > current:
            wanted = min(wanted, self._limit(now_s, current, self.spec.scale_up, +1))
        elif wanted < current:
            wanted = max(wanted, self._limit(now_s, current, self.spec.scale_down, -1))
        return min(max(wanted, self.spec.min_replicas), self.spec.max_replicas)

    def _limit(self, now_s: float, current: int, rules: ScalingRules, sign: int) -> int:
        """Returns the furthest that a policy allows: the one that allows the most counts."""
        limits = []
        for policy in rules.policies:
            done = sum(
                change
                for at, change in self._changes
                if at > now_s - policy.period_s and change * sign > 0
            )
            start = current - done
            step = (
                policy.value
                if policy.type == "Pods"
                else math.ceil(abs(start) * policy.value / 100)
            )
            limits.append(start + sign * step)
        if not limits:
            return self.spec.max_replicas if sign > 0 else self.spec.min_replicas
        return max(max(limits), current) if sign > 0 else min(min(limits), current)
