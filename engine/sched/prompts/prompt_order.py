"""Says which prompt goes on next, and how much of a step it gets. Pure: no clock, no queues.

The scheduler of an engine and the simulated engine (`planner.simulation`) ask the same object.

    a step is full   where more tokens gain nothing by sharing it. Prompts of that length are
                     computed one after the other, shorter ones share a step and end in it
    a turn           before each step one of two lines begins: that of what is left to compute, the
                     shortest first, or that of what is due, the earliest first
    due              when a prompt has waited `patience` times as long as it takes by itself.
                     Prompts that are due get every second step, until none is
    a part           is what a step computes of a prompt that takes several: a full step; of one
                     that takes very many, as much as two of the shortest prompts that came lately,
                     and a quarter of a full step at least. The next step may be another's; the
                     prompt keeps its blocks, and goes on behind its last part

So nothing starves: what is due waits for at most as much work of others as came before it was due,
and gets half of the steps. And a long prompt, due or not, takes no two steps in a row while a
shorter one waits. `docs/routing.md` has the figures, and those of other orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from engine.contracts.steps.step_shapes import FULL_TOKENS
from engine.sched.prompts.even_chunks import EvenChunks

_GAIN = 1.05
"""A step is full when no fuller one computes a token in this much less time."""
_WHOLE = 2
"""A prompt of which this many full steps are left is computed at once: another part would cost more
than it gains."""
_VERY_LONG, _FINEST = 16, 4
"""A prompt of more full steps than that is cut finer, to parts of one in this many at most: it
would hold all that come up for so long that it pays to be slower itself."""
_HOLD = 2
"""A part of such a prompt is no more than this many times the shortest prompt. One that comes while
the part is computed then waits for no more than twice the time that it takes by itself: shorter
prompts than half of the finest part take hardly less time than that."""
_SHORTEST_S = 10.0
"""Seconds for which the shortest prompt counts."""
_MEMORY_S = 60.0
"""Prompts that met so recently may meet again."""


MANY_PROMPTS = 1 << 30
"""More than a step computes parts of."""


class Line(IntEnum):
    """An order of prompts."""

    SHORTEST = 0
    DUE = 1


class StepRoom:
    """Counts what one step has left for prompts.

    `left` counts tokens of the step's budget. What a token costs behind a long context is counted
    beside it, in tokens at the beginning of a prompt: a step is full when either is used up.
    `prompts_left` counts the prompts of which it may compute parts.
    """

    prompts_left = MANY_PROMPTS

    def __init__(
        self,
        tokens: int,
        longest_part: int,
        chunks: EvenChunks | None = None,
        *,
        full: int = 0,
        whole: int = 0,
        finest: int = 0,
    ) -> None:
        """Takes the budget and what of it one prompt may have.

        Args:
            chunks: Says what tokens behind a context cost; None: as much as others.
            full: The step is full with this much, and prompts that share it end in it; 0: prompts
                fill the budget, the last one with a part.
            whole: What is left of the first prompt is computed at once if it is no more; of a
                longer one, as much as fills the step.
            finest: A part of a very long prompt is no more than that; 0: as much as fills the step.
        """
        self.left = tokens
        self._longest_part = longest_part
        self._chunks = chunks
        self._shares_parts = not full
        self._full = min(full or tokens, tokens)
        self._whole = min(whole or self._full, tokens)
        self._finest = min(finest or self._full, self._full)
        self._used = 0

    @property
    def is_full(self) -> bool:
        return min(self.left, self.prompts_left) <= 0 or 0 < self._full <= self._used

    def part(self, context: int, remaining: int) -> int:
        """Returns how many of a prompt's `remaining` tokens behind `context` the step computes; 0:
        none, it is full."""
        room = self._full - self._used
        if not self._used:
            worth = remaining if self._chunks is None else self._chunks.worth(context, remaining)
            room = self._full
            if worth <= self._whole:
                room = self._whole
            elif not self._shares_parts and worth > _VERY_LONG * self._full:
                room = self._finest
        limit = min(room, self._longest_part, self.left)
        if limit <= 0 or self.prompts_left <= 0:
            return 0
        count = limit
        if self._chunks is not None:
            count = self._chunks.longest(context, limit)
        if count >= remaining:
            return remaining
        return count if self._shares_parts or not self._used else 0

    def take(self, context: int, count: int) -> None:
        """Counts a part that the step computes."""
        self.left -= count
        self.prompts_left -= 1
        self._used += count if self._chunks is None else self._chunks.charge(context, count)

    def take_decode(self, count: int) -> None:
        """Counts `count` tokens of a request that decodes from this step on."""
        self.left -= count
        self.prompts_left -= 1


@dataclass(slots=True, kw_only=True)
class PromptOrder:
    """Orders the prompts of one engine.

    Attributes:
        chunks: Says what parts cost.
        full_tokens: A step is full with this many tokens.
        patience: A prompt is due after this many times the time that it takes by itself.
    """

    chunks: EvenChunks
    full_tokens: int = FULL_TOKENS
    patience: float = 8.0
    _last: Line = Line.SHORTEST
    _met_at: float = float("-inf")
    _shortest: float = float("inf")
    _shortest_at: float = float("-inf")

    def due_at(self, arrived_at: float, seconds: float) -> float:
        """Returns when a prompt is due that came at `arrived_at` and takes `seconds` alone."""
        return arrived_at + self.patience * seconds

    def turn(self, now: float, earliest_due_at: float, *, insists: bool = False) -> Line:
        """Returns the line whose first prompt begins the next step. What is due `insists` while it
        finds no room: none may take any before it."""
        is_due = earliest_due_at <= now and (insists or self._last is not Line.DUE)
        self._last = Line.DUE if is_due else Line.SHORTEST
        return self._last

    def room(
        self,
        now: float,
        tokens: int,
        longest_part: int,
        num_prompts: int,
        shortest: float = float("inf"),
    ) -> StepRoom:
        """Returns the room of a step with a budget of `tokens` for prompts, of which `num_prompts`
        are there. Where none meets another, each gets all of the budget. `shortest`: the least work
        of those that no step has begun, in tokens at the beginning of a prompt.
        """
        if shortest <= self._shortest or now - self._shortest_at > _SHORTEST_S:
            self._shortest, self._shortest_at = shortest, now
        if num_prompts > 1:
            self._met_at = now
        if now - self._met_at > _MEMORY_S:
            return StepRoom(tokens, longest_part)
        full = min(self.full_tokens, tokens)
        finest = round(max(full / _FINEST, min(full, _HOLD * self._shortest)))
        whole = _WHOLE * full
        return StepRoom(tokens, longest_part, self.chunks, full=full, whole=whole, finest=finest)


def full_tokens(steps: Sequence[tuple[int, float]]) -> int:
    """Returns the tokens that fill a step, from (tokens, seconds) of steps that were measured:
    between two of them, the time is on the line through both. Raises ValueError for none."""
    points = sorted(steps)
    if not points:
        raise ValueError("no step was measured")
    enough = _GAIN * min(seconds / tokens for tokens, seconds in points)
    for index, (tokens, seconds) in enumerate(points):
        if seconds <= enough * tokens:
            if index == 0:
                return tokens
            before, before_s = points[index - 1]
            each = (seconds - before_s) / (tokens - before)
            return min(tokens, round((before_s - each * before) / (enough - each)))
    return points[-1][0]
