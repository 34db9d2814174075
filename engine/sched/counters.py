"""Totals of one scheduler since its start, and the speed of its prefills."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

from engine.contracts.outputs import DraftStats, TokensPerStep

_MEMORY_TOKENS = 32_768
"""A step's weight falls to 1/e while this many prompt tokens are computed."""
_LEAST_STEPS = 4
"""The rate is unknown before this many: the first steps of a process are slow, and one of few
tokens says little."""


class PrefillRate:
    """Measures how quickly a backlog of prompts is computed, in prompt tokens per second.

    Steps weigh by their tokens, in the mean and in what is forgotten: a step costs some time
    whatever it computes, so that steps with a few tokens each say nothing about full ones, which
    are what a backlog makes. Small steps alone are still reported as they were.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._num_steps = 0

    def add_step(self, num_tokens: int, seconds: float) -> None:
        """Counts a step that computed `num_tokens` > 0 of prompts."""
        keep = math.exp(-num_tokens / _MEMORY_TOKENS)
        self._tokens = self._tokens * keep + num_tokens * num_tokens
        self._seconds = self._seconds * keep + num_tokens * seconds
        self._num_steps += 1

    @property
    def tokens_per_s(self) -> float:
        """Returns the rate, which is 0 while too few steps were seen."""
        if self._num_steps < _LEAST_STEPS or self._seconds <= 0:
            return 0.0
        return self._tokens / self._seconds

    def seconds_for(self, num_tokens: int) -> float:
        """Returns how long this many take; 0: the rate is unknown."""
        rate = self.tokens_per_s
        return num_tokens / rate if rate else 0.0


@dataclass(slots=True)
class SchedulerCounters:
    """Names as in `SchedulerStats`."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens_computed: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    step_tokens: TokensPerStep = field(default_factory=TokensPerStep)
    last_step_at: float = 0.0
    drafts: DraftStats = field(default_factory=DraftStats)

    def add_step(self, num_prompt_tokens: int, num_new_tokens: int, ended_at: float) -> None:
        """Counts a step that computed this many prompt tokens and gave this many new ones."""
        self.prompt_tokens_computed += num_prompt_tokens
        self.num_steps += 1
        self.step_tokens.add(num_prompt_tokens + num_new_tokens)
        self.last_step_at = ended_at

    def add_lookup(self, num_tokens: int, num_hits: int) -> None:
        """Counts a prompt that was looked up in the prefix cache and starts behind the hit."""
        self.prefix_cache_queries += num_tokens
        self.prefix_cache_hits += num_hits

    def by_name(self) -> dict[str, Any]:
        """Returns the totals as `SchedulerStats` takes them."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        for grows in ("drafts", "step_tokens"):
            found[grows] = deepcopy(found[grows])
        return found
