"""Learns from prompts that were served how long a prefill node computes one.

    seconds = base_s + per_token_s · u + per_pair_s · u · n

`u` tokens are new, the prompt has `n`; the last term is attention. The three constants follow all
nodes together (they serve the same model) as they are; what is special about one node is in its
`Pace`, which compares it with them. The fit never sees a time divided by a pace: then both could
grow apart without end, since only their product would be measured.

1. prior    nothing was measured: an assumed speed, no attention
2. fitted   least squares over relative errors, so that short prompts count as much as long
            ones; old measurements fade with a memory of about `_MEMORY` prompts. No constant is
            negative (coordinate descent on the normal equations, from the last solution on).

How quickly a queue goes on is another figure: prompts that wait are computed together, and those
that were computed together took as long as all of them. It is what nodes report.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MEMORY = 500
_PRIOR_WEIGHT = 2.0
_MEAN_OVER = 100
_PRIOR_PROMPT = 1000
_PRIOR_PROMPTS = 10
"""Prior of 10 prompts of 1,000 tokens, so that one slow first prompt does not dominate."""
_QUEUE_PART = 0.1
_SWEEPS = 8
_SCALES = (1.0, 1e-3, 1e-8)
"""Bring base, tokens and pairs to about the same size."""


@dataclass(frozen=True, slots=True)
class ServiceTime:
    base_s: float
    per_token_s: float
    per_pair_s: float

    def seconds(self, num_new: float, num_prompt: float) -> float:
        return self.base_s + num_new * (self.per_token_s + self.per_pair_s * num_prompt)


@dataclass(slots=True)
class ServiceTimeFit:
    """Fits a line. `tokens_per_s` is assumed until prompts were served."""

    tokens_per_s: float
    time: ServiceTime = field(init=False)
    mean_s: float = field(init=False)
    """Seconds of one prompt, in which margins are measured."""
    s_per_queued_token: float = field(init=False)
    """Seconds in which a node gets through one token of its queue, by what nodes report."""
    num_observed: int = 0
    _matrix: list[list[float]] = field(init=False)
    _right: list[float] = field(init=False)
    _x: list[float] = field(init=False)

    def __post_init__(self) -> None:
        per_token_s = 1 / self.tokens_per_s
        self.s_per_queued_token = per_token_s
        self.mean_s = _PRIOR_PROMPT * per_token_s
        self.time = ServiceTime(0.0, per_token_s, 0.0)
        self._x = [0.0, per_token_s / _SCALES[1], 0.0]
        self._matrix = [[_PRIOR_WEIGHT if i == j else 0.0 for j in range(3)] for i in range(3)]
        self._right = [_PRIOR_WEIGHT * x for x in self._x]

    def observe(self, num_new: int, num_prompt: int, seconds: float) -> None:
        """Learns from one prompt, which took `seconds` on any node."""
        if num_new <= 0 or seconds <= 0:
            return
        row = [_SCALES[0], _SCALES[1] * num_new, _SCALES[2] * num_new * num_prompt]
        weight = 1 / seconds**2
        keep = 1 - 1 / _MEMORY
        for i in range(3):
            self._right[i] = keep * self._right[i] + weight * row[i] * seconds
            for j in range(3):
                self._matrix[i][j] = keep * self._matrix[i][j] + weight * row[i] * row[j]
        self._solve()
        self.num_observed += 1
        part = 1 / min(self.num_observed + _PRIOR_PROMPTS, _MEAN_OVER)
        self.mean_s += (seconds - self.mean_s) * part

    def observe_queue(self, tokens_per_s: float) -> None:
        """Learns how quickly a node says that it computes; 0 says nothing."""
        if tokens_per_s > 0:
            self.s_per_queued_token += (1 / tokens_per_s - self.s_per_queued_token) * _QUEUE_PART

    def _solve(self) -> None:
        x, a = self._x, self._matrix
        for _ in range(_SWEEPS):
            for i in range(3):
                others = sum(a[i][j] * x[j] for j in range(3) if j != i)
                x[i] = max(0.0, (self._right[i] - others) / a[i][i])
        self.time = ServiceTime(*(value * scale for value, scale in zip(x, _SCALES, strict=True)))
