"""Totals of one scheduler since its start, and the speed of its prefills."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

from engine.outputs import DraftStats, TokensPerStep

_DECAY = 0.9
"""Weight that a step with prompt tokens leaves to those before it."""


class PrefillRate:
    """Prompt tokens per second over the latest steps that computed any."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add_step(self, num_tokens: int, seconds: float) -> None:
        self._tokens = self._tokens * _DECAY + num_tokens
        self._seconds = self._seconds * _DECAY + seconds

    @property
    def tokens_per_s(self) -> float:
        """Returns the rate, which is 0 before the first step."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


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
        """Counts a step that computed so many prompt tokens and gave so many new ones."""
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
