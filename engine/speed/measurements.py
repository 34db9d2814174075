"""Times an engine that serves nothing else: steps of a batch, prompts alone, many prompts."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.contracts.messages import EngineCoreRequest
from engine.contracts.sampling_params import SamplingParams
from engine.speed.offline_engine import GREEDY, OfflineEngine
from engine.speed.profile import DecodePoint, PrefillPoint

_PROMPTS_ALONE = 6


@dataclass(frozen=True, slots=True)
class StepSpread:
    """Holds seconds of a decode step: mean, median, 99th percentile."""

    mean_s: float
    median_s: float
    p99_s: float


class BatchDoesNotFit(ValueError):
    """Says that a batch has no step of its own: the KV of all its requests has no room."""


def decode_steps(
    engine: OfflineEngine,
    batch: int,
    context: int,
    num_steps: int,
    step_tokens: int,
    sampling: Sequence[SamplingParams] = (),
) -> StepSpread:
    """Times `num_steps` steps of a batch whose prompts have `context` tokens. `step_tokens` is the
    prefill budget of a step: all prompts must be computed before the first step that counts.
    `sampling`: of the first requests; the others are greedy."""
    num_tokens = num_steps + 1 + -(-batch * context // step_tokens)
    chosen = [*sampling, *[GREEDY] * (batch - len(sampling))]
    requests = [engine.request(context, num_tokens, each) for each in chosen]
    steps = engine.run(requests)
    first = next((i for i, step in enumerate(steps) if step.num_tokens >= batch), None)
    if first is None:
        raise BatchDoesNotFit(
            f"{batch} requests of {context} tokens never ran in one step; the GPU has "
            f"{engine.core.num_blocks} blocks of KV: measure fewer, or shorter ones"
        )
    measured = steps[first : first + num_steps + 1]
    gaps = sorted((b.at - a.at) * batch / b.num_tokens for a, b in pairwise(measured))
    count = sum(step.num_tokens for step in measured[1:]) / batch
    mean_s = (measured[-1].at - measured[0].at) / count
    return StepSpread(mean_s, statistics.median(gaps), gaps[int(0.99 * len(gaps))])


def prompts_alone(engine: OfflineEngine, length: int, rest_s: float = 0.0) -> list[float]:
    """Returns the seconds from a prompt to its first token, sorted, without the first one's.

    Args:
        rest_s: The device rests so long in front of each prompt; 0: they come back to back, and a
            GPU is as hot as prompts make it.
    """
    times = []
    for _ in range(_PROMPTS_ALONE):
        time.sleep(rest_s)
        times.append(duration_s(engine, [engine.request(length, 1)]))
    return sorted(times[1:])


def prompts_together(engine: OfflineEngine, count: int, length: int) -> float:
    """Returns the seconds until all of this many prompts have their first token."""
    requests = [engine.request(length, 1) for _ in range(count)]
    return duration_s(engine, requests)


def duration_s(engine: OfflineEngine, requests: list[EngineCoreRequest]) -> float:
    """Returns the seconds from the arrival of the requests to the last result."""
    gc.collect()
    started = time.perf_counter()
    steps = engine.run(requests)
    return steps[-1].at - started


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPlan:
    """Says what a profile is made of.

    Attributes:
        lengths: Of single prompts.
        many: Lengths of prompts that fill four steps together.
        batches: Of decode steps, each at the first of `contexts`; the middle one at all of them.
    """

    lengths: Sequence[int] = (16, 128, 512, 2048, 8192)
    many: Sequence[int] = (2048, 8192, 32_768)
    batches: Sequence[int] = (1, 16, 64, 128, 256)
    contexts: Sequence[int] = (1024, 4096)
    num_steps: int = 128


@dataclass(slots=True)
class Measurements:
    """Measures what fits. `max_tokens` of KV are there, prompts may have `max_length`."""

    engine: OfflineEngine
    plan: MeasurementPlan
    max_tokens: int
    max_length: int
    step_tokens: int
    note: Callable[[str], None]

    def prefill(self) -> tuple[PrefillPoint, ...]:
        points = []
        for length in self.plan.lengths:
            if self._fits(1, length, 2):
                median_s = statistics.median(prompts_alone(self.engine, length))
                points.append(PrefillPoint(1, length, median_s))
                self.note(f"a prompt of {length} tokens: {1e3 * median_s:.2f} ms")
        for length in self.plan.many:
            count = max(2, 4 * self.step_tokens // length)
            count = min(count, self.max_tokens // (length + 2))
            if count > 1 and self._fits(count, length, 2):
                seconds = prompts_together(self.engine, count, length)
                points.append(PrefillPoint(count, length, seconds))
                self.note(f"{count} prompts of {length}: {count * length / seconds:.0f} tokens/s")
        return tuple(points)

    def decode(self) -> tuple[DecodePoint, ...]:
        steps, first = self.plan.num_steps, self.plan.contexts[0]
        middle = sorted(self.plan.batches)[len(self.plan.batches) // 2]
        wanted = [(batch, first) for batch in self.plan.batches]
        wanted += [(middle, context) for context in self.plan.contexts[1:]]
        points = []
        for batch, context in wanted:
            room = steps + 2 + -(-batch * context // self.step_tokens)
            if not self._fits(batch, context, room):
                self.note(f"{batch} sequences of {context} tokens do not fit: left out")
                continue
            found = decode_steps(self.engine, batch, context, steps, self.step_tokens)
            mean = context + steps / 2
            points.append(DecodePoint(batch, mean, found.mean_s, found.p99_s))
            self.note(f"a step of {batch} at {context} tokens: {1e3 * found.mean_s:.3f} ms")
        return tuple(points)

    def _fits(self, count: int, length: int, more: int) -> bool:
        return length + more <= self.max_length and count * (length + more) <= self.max_tokens
