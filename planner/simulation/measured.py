"""Collects what clients of the simulated cluster see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_SLOW_PART = 0.02


@dataclass(slots=True, kw_only=True)
class Measured:
    """Holds figures of the requests after the warm-up. Seconds; tokens.

    Attributes:
        answers: (arrival, TTFT, mean time between tokens) of each complete answer.
        gaps: Times between tokens, and how often each was seen.
        num_full: Prompts that a prefill node was too full for.
        num_refused: Requests that a router refused.
        num_overfull: Requests that a decode node had no KV left for.
        num_batch, num_batch_tokens: Requests of batches that ended, and their tokens.
    """

    ttft_s: list[float] = field(default_factory=list)
    decision_s: list[float] = field(default_factory=list)
    choices: Counter[str] = field(default_factory=Counter)
    answers: list[tuple[float, float, float]] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    num_cached: int = 0
    num_prompt: int = 0
    num_output: int = 0
    num_full: int = 0
    num_refused: int = 0
    num_overfull: int = 0
    num_batch: int = 0
    num_batch_tokens: int = 0


def weighted_quantiles(
    values: Sequence[tuple[float, float]], parts: Sequence[float]
) -> list[float]:
    """Returns the values below which each of `parts`, rising, of the weight lies; 0 for none."""
    ordered = sorted(values)
    total = sum(weight for _, weight in ordered)
    found: list[float] = []
    seen = 0.0
    for value, weight in ordered:
        seen += weight
        while len(found) < len(parts) and seen >= parts[len(found)] * total:
            found.append(value)
    return found + [ordered[-1][0] if ordered else 0.0] * (len(parts) - len(found))


def with_spread(values: Sequence[tuple[float, float]], spread: float) -> list[tuple[float, float]]:
    """Returns the values as noisy ones are seen: one in fifty longer by the factor `spread`, which
    is the 99th percentile of a step over its mean."""
    slow = [(spread * value, _SLOW_PART * weight) for value, weight in values]
    return slow + [(value, (1 - _SLOW_PART) * weight) for value, weight in values]
