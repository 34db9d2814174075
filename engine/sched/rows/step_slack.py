"""Bounds the prompt tokens of a step so that answers beside them get theirs within an objective.

    seconds of a step = decode + each · prompt tokens

1. unknown    no step was measured beside running answers: a step takes `_FIRST` tokens
2. measured   steps without prompts give `decode`, those with prompts `each`; both follow what is
              measured, and `each` rises at once and falls slowly, since a step that is too long is
              seen by every running answer
3. alone      nothing decodes: there is nothing to protect, steps are filled

A step takes `_FEWEST` tokens at least, so that what must be computed here (no prefill node is left)
goes on whatever the objective. Who chooses whether to compute prompts here asks `tokens_per_s`.
"""

from __future__ import annotations

_PART = 0.9
"""Steps aim at this much of the objective: half of them take longer than estimated."""
_FIRST = 256
_FEWEST = 64
_UNIT = 64
"""Kernels work on tiles of this many tokens."""
_WEIGHT = 0.2
"""Weight of the last step in what is measured."""


class StepSlack:
    """Measures the steps of one engine. With an objective of 0 s nothing is bounded."""

    def __init__(self, objective_s: float) -> None:
        self.objective_s = objective_s
        self._decode_s = 0.0
        self._each_s = 0.0

    def limit(self, budget: int, num_decodes: int) -> int:
        """Returns what of `budget` prompts may take of a step in which this many rows decode."""
        if not self.objective_s or not num_decodes:
            return budget
        return min(budget, max(_FEWEST, self._tokens()))

    def tokens_per_s(self, usage: float) -> float:
        """Returns the prompt tokens a second that steps have room for beside what decodes; 0: none,
        or there is no objective. `usage`: of blocks or rows, whichever are rarer, 0..1. Answers
        stay longer when their steps do, so more of them are here at once: they must fit even if
        every second step is as long as the objective."""
        if not self.objective_s or usage * (self._decode_s + self.objective_s) > 2 * self._decode_s:
            return 0.0
        return self._tokens() / self.objective_s

    def observe(self, seconds: float, num_decodes: int, num_prompt_tokens: int) -> None:
        """Learns from a step that has ended."""
        if not self.objective_s or not num_decodes or seconds <= 0:
            return
        if not num_prompt_tokens:
            self._decode_s += (seconds - self._decode_s) * (_WEIGHT if self._decode_s else 1.0)
            return
        each_s = max(0.0, seconds - self._decode_s) / num_prompt_tokens
        weight = 1.0 if each_s > self._each_s else _WEIGHT
        self._each_s += (each_s - self._each_s) * weight

    def _tokens(self) -> int:
        room_s = _PART * self.objective_s - self._decode_s
        if not self._each_s:
            return _FIRST if room_s > 0 else 0
        return max(0, int(room_s / self._each_s) // _UNIT * _UNIT)
