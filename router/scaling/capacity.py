"""Says how many nodes a load takes so that an objective holds: the model behind the signal.

Prefill is a queue with c servers. The share of prompts that wait, and how long (Sakasegawa 1977;
Allen and Cunneen for services of any spread):

    waits   = ρ ^ (√(2(c + 1)) − 1)                 ρ = load / c
    tail_s  = s̄ · (1 + cv²) / 2 / (c · (1 − ρ))      the mean wait of those who wait
    p99     = tail_s · ln(100 · waits)              0 when fewer than one in 100 wait

c need not be whole: shares of several routers are added before they are rounded.

Decode nodes step; a step of n sequences takes t₀ + t₁ · n. The largest batch whose step is within
the objective, and that fits into the KV cache, gives the tokens that a node brings in a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_PART = 0.01
_LEAST_ROOM = 0.25
"""Share of the TTFT objective a prompt may queue even if its own prefill exceeds it."""
_MOST_NODES = 10_000.0
_MEMORY = 300


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Describes the work of one prompt in seconds of an ordinary node: mean, squared coefficient of
    variation, and what 99 in 100 do not exceed."""

    mean_s: float
    cv2: float = 1.0
    p99_s: float = 0.0


def wait_p99_s(load: float, num_nodes: float, service: PromptWork) -> float:
    """Returns the wait that one prompt in a hundred exceeds, with `load` in busy nodes."""
    busy = load / num_nodes
    if busy >= 1:
        return math.inf
    waits = busy ** (math.sqrt(2 * (num_nodes + 1)) - 1)
    if waits <= _PART:
        return 0.0
    tail_s = service.mean_s * (1 + service.cv2) / 2 / (num_nodes * (1 - busy))
    return tail_s * math.log(waits / _PART)


def prefill_nodes(load: float, service: PromptWork, ttft_s: float) -> float:
    """Returns the smallest number of nodes, not rounded, that keeps the objective."""
    if load <= 0:
        return 0.0
    room_s = max(ttft_s - service.p99_s, _LEAST_ROOM * ttft_s)
    low, high = load, min(_MOST_NODES, 2 * load + 2)
    while wait_p99_s(load, high, service) > room_s and high < _MOST_NODES:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        if wait_p99_s(load, middle, service) > room_s:
            low = middle
        else:
            high = middle
    return high


@dataclass(slots=True)
class StepFit:
    """Learns t₀ and t₁ from answers: how long tokens took with this many sequences on the node.

    Least squares over relative errors with a memory of `_MEMORY` answers; neither is negative.
    """

    num_observed: int = 0
    most_sequences: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def observe(self, num_sequences: float, seconds: float) -> None:
        if num_sequences <= 0 or seconds <= 0:
            return
        self.num_observed += 1
        self.most_sequences = max(num_sequences, self.most_sequences * (1 - 1 / _MEMORY))
        weight = 1 / seconds**2
        n = num_sequences
        new = (weight, weight * n, weight * n * n, weight * seconds, weight * seconds * n)
        keep = 1 - 1 / _MEMORY
        self._sums = [keep * old + value for old, value in zip(self._sums, new, strict=True)]

    def seconds(self, num_sequences: float) -> float:
        """Returns the time of a step; 0 while nothing is known."""
        base_s, each_s = self._line()
        return base_s + each_s * num_sequences

    def batch_within(self, seconds: float) -> float:
        """Returns the largest batch whose step takes no longer, at least 1 and at most twice as
        many sequences as were seen."""
        most = max(1.0, 2 * self.most_sequences)
        base_s, each_s = self._line()
        if each_s <= 0:
            return most if base_s <= seconds else 1.0
        return min(most, max(1.0, (seconds - base_s) / each_s))

    def _line(self) -> tuple[float, float]:
        w, wn, wnn, wt, wtn = self._sums
        if w <= 0:
            return 0.0, 0.0
        spread = w * wnn - wn * wn
        each_s = (w * wtn - wn * wt) / spread if spread > 1e-9 * w * wnn else 0.0
        if each_s <= 0:
            return wt / w, 0.0
        base_s = (wt - each_s * wn) / w
        return (base_s, each_s) if base_s > 0 else (0.0, wtn / wnn)
