"""Makes chunks of prompts that all take the same time, so that pipeline stages stay even.

A token that sees more costs more. With b FLOPs for its linear layers and 2a for each token that it
sees, x tokens behind L others cost

    t(L, x) = b x + a (2 L x + x^2)

and the chunk behind L that takes as long as the first one, of X tokens, solves t(L, x) = t(0, X).
The rule is that of chunked pipeline parallelism in SGLang (LMSYS, January 2026), with coefficients
that follow from the model in place of measured ones.
"""

from __future__ import annotations

from math import ceil, sqrt

from engine.contracts.steps.step_work import ModelCost

_UNIT = 64
"""Chunks that were made shorter have a multiple of this many tokens: kernels work on tiles."""


COST_BY_TOKENS = ModelCost(
    flops_per_token=1.0, flops_per_sample=0.0, weight_bytes=0.0, token_bytes=0.0, attention=()
)
"""Is taken for the cost of a model that is not described: all tokens cost the same."""


def whole_tiles(num_tokens: int) -> int:
    """Rounds up to what kernels work on anyway."""
    return -(-num_tokens // _UNIT) * _UNIT


class EvenChunks:
    """Cuts the prompts of steps that have `budget` tokens at most."""

    def __init__(self, cost: ModelCost, budget: int) -> None:
        self._budget = budget
        self._a = cost.flops_of_pair / 2
        self._b = cost.flops_per_token + sum(
            kind.flops_of_prompts * kind.window
            for kind in cost.attention
            if kind.window is not None
        )
        self._per_token = self._time(0, budget) / budget
        """The time that each token of the budget stands for."""

    def longest(self, context: int, limit: int) -> int:
        """Returns how many tokens behind `context` others take as long as a step that begins a
        prompt with `limit` tokens: at least one, and no more than `limit`."""
        a, b = self._a, self._b + 2 * self._a * context
        time = self._per_token * limit
        found = time / b if a == 0 else (sqrt(b * b + 4 * a * time) - b) / (2 * a)
        if found >= limit:
            return limit
        return min(limit, max(int(found) // _UNIT * _UNIT, _UNIT))

    def charge(self, context: int, count: int) -> int:
        """Returns what a chunk takes of the budget, at least its tokens: other prompts in the step
        get what is left."""
        return min(self._budget, max(count, ceil(self.worth(context, count))))

    def worth(self, context: int, count: int) -> float:
        """Returns how many tokens of a step that begins a prompt take as long as a chunk."""
        return self._time(context, count) / self._per_token

    def _time(self, context: int, count: int) -> float:
        return self._b * count + self._a * (2 * context * count + count * count)
