"""A HorizontalPodAutoscaler as Kubernetes defines it, for one External metric with AverageValue.

Each sync, every 15 s (kubernetes.io, "Horizontal Pod Autoscaling"; pkg/controller/podautoscaler):

1. ratio        sum / (target · replicas); within the tolerance nothing changes
2. wanted       ⌈sum / target⌉
3. stabilised   the present number is brought between the least recommendation of the up window
                and the greatest of the down window
4. policies     at most this many more or fewer in a period; of several the one that allows most
5. bounds       minReplicas, maxReplicas
-  blind        without a metric nothing changes
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

SYNC_S = 15.0


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """Allows a change of `value` pods, or percent of what there was, in `period_s`."""

    kind: Literal["Pods", "Percent"]
    value: int
    period_s: float


@dataclass(frozen=True, slots=True)
class Rules:
    window_s: float
    policies: tuple[ScalingPolicy, ...]


DEFAULT_UP = Rules(0.0, (ScalingPolicy("Pods", 4, 15.0), ScalingPolicy("Percent", 100, 15.0)))
DEFAULT_DOWN = Rules(300.0, (ScalingPolicy("Percent", 100, 15.0),))


@dataclass(slots=True, kw_only=True)
class Hpa:
    """Decides about one workload. `target`: of the metric for each pod."""

    target: float
    min_replicas: int = 1
    max_replicas: int = 100
    tolerance: float = 0.1
    up: Rules = DEFAULT_UP
    down: Rules = DEFAULT_DOWN
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)
    _changes: deque[tuple[float, int]] = field(default_factory=deque)

    def decide(self, now: float, replicas: int, total: float | None) -> int:
        """Returns the number of pods there should be, with `replicas` and the metric's sum."""
        if total is None:
            return replicas
        bounded = self._bounded(self._recommended(replicas, total))
        self._wanted.append((now, bounded))
        longest = max(self.up.window_s, self.down.window_s)
        while self._wanted[0][0] < now - longest:
            self._wanted.popleft()
        wanted = self._limited(now, replicas, self._stabilised(now, replicas, bounded))
        wanted = self._bounded(wanted)
        if wanted != replicas:
            self._changes.append((now, wanted - replicas))
        return wanted

    def _recommended(self, replicas: int, total: float) -> int:
        if abs(total / (self.target * replicas) - 1) <= self.tolerance:
            return replicas
        return math.ceil(total / self.target)

    def _stabilised(self, now: float, replicas: int, bounded: int) -> int:
        least = min(
            (w for at, w in self._wanted if at > now - self.up.window_s),
            default=bounded,
        )
        most = max(
            (w for at, w in self._wanted if at > now - self.down.window_s),
            default=bounded,
        )
        return min(max(replicas, min(least, bounded)), max(most, bounded))

    def _limited(self, now: float, replicas: int, wanted: int) -> int:
        if wanted > replicas:
            limits = [self._limit(now, replicas, policy, 1) for policy in self.up.policies]
            return min(wanted, max(limits))
        if wanted < replicas:
            limits = [self._limit(now, replicas, policy, -1) for policy in self.down.policies]
            return max(wanted, min(limits))
        return wanted

    def _limit(self, now: float, replicas: int, policy: ScalingPolicy, sign: int) -> int:
        recent = sum(
            change
            for at, change in self._changes
            if at > now - policy.period_s and change * sign > 0
        )
        begun = replicas - recent
        if policy.kind == "Pods":
            return begun + sign * policy.value
        grown = begun * (1 + sign * policy.value / 100)
        return math.ceil(grown) if sign > 0 else int(grown)

    def _bounded(self, replicas: int) -> int:
        return max(self.min_replicas, min(self.max_replicas, replicas))
