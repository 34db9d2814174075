"""Says how long one step of an engine takes.

A step computes one token of each running sequence, and parts of prompts:

    decode only    T(n) at the measured context, and the reading of what their KV is longer
    prompts only   V: the measured curve of single prompts by tokens in the step, and attention
    both           the longer of two: the decode step alone; the prompts' step with the sequences'
                   tokens in it and the reading of their KV

The last is a roofline's view: GEMMs of many prompt tokens read the weights anyway, so decoding
beside them is almost free, and what it costs is that every running answer waits for the prompts.
Where steps of both were measured, they take its place: a decode step, and what prompts with as many
tokens made it longer.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.speed.profile import SpeedProfile


class Part(NamedTuple):
    """Is `num_new` tokens of a prompt, computed in a step after `num_before` of its tokens."""

    num_new: int
    num_before: int


class StepTimes(Protocol):
    """Gives seconds."""

    def decode_s(self, num_sequences: int, num_kv: float) -> float:
        """Returns the time of a step of sequences that have `num_kv` tokens together; linear in
        `num_kv`."""

    def step_s(self, parts: Sequence[Part], num_sequences: int, num_kv: float) -> float:
        """Returns the time of a step with parts of prompts in it."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Gives the seconds of one prompt: 8000 tokens a second, and attention. A decode step takes as
    long for any batch."""

    base_s: float = 0.02
    per_token_s: float = 1 / 8000
    per_pair_s: float = 0.5e-9
    token_s: float = 0.025

    def seconds(self, num_new: int, num_prompt: int) -> float:
        return self.base_s + num_new * (self.per_token_s + self.per_pair_s * num_prompt)

    def decode_s(self, num_sequences: int, num_kv: float) -> float:
        return self.token_s

    def step_s(self, parts: Sequence[Part], num_sequences: int, num_kv: float) -> float:
        return sum(self.seconds(part.num_new, part.num_before + part.num_new) for part in parts)


@dataclass(slots=True, eq=False)
class MeasuredTimes:
    """Gives the times of a profile; between two measured points times are interpolated, beyond the
    last they go on as between the last two. `chunk_s`: the seconds that prompts
    make a decode step longer, by their tokens; empty: they were not measured."""

    profile: SpeedProfile
    chunk_s: Mapping[int, float] = field(default_factory=dict)
    pair_s: float = field(init=False)
    """Seconds of attention for each prompt token and token of its context, where it is short."""
    kv_read_s: float = field(init=False)
    _lengths: list[float] = field(init=False)
    _longer_s: list[float] = field(init=False)
    _tokens: list[float] = field(init=False)
    _token_s: list[float] = field(init=False)
    _sequences: list[float] = field(init=False)
    _sequence_s: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._lengths, self._longer_s = _attention_s(self.profile)
        self.pair_s = 2 * interpolate(self._lengths, self._longer_s, 1.0)
        self.kv_read_s = self.profile.kv_read_s or _kv_read_s(self.profile)
        alone = sorted((p.tokens, p.seconds) for p in self.profile.prefill if p.prompts == 1)
        self._tokens = [float(tokens) for tokens, _ in alone]
        self._token_s = _rising([seconds - self.attention_s(tokens) for tokens, seconds in alone])
        steps = {p.sequences: p for p in sorted(self.profile.decode, key=lambda p: -p.context)}
        self._sequences = [float(count) for count in sorted(steps)]
        self._sequence_s = [
            steps[round(count)].seconds - self.kv_read_s * count * steps[round(count)].context
            for count in self._sequences
        ]

    def decode_s(self, num_sequences: int, num_kv: float) -> float:
        base_s = interpolate(self._sequences, self._sequence_s, num_sequences)
        return base_s + self.kv_read_s * num_kv

    def tokens_s(self, num_tokens: int) -> float:
        """Returns the time of a step with this many tokens, without attention."""
        return interpolate(self._tokens, self._token_s, num_tokens)

    def attention_s(self, num_tokens: int) -> float:
        """Returns the time of attention of a prompt's first tokens."""
        return num_tokens * interpolate(self._lengths, self._longer_s, num_tokens)

    def step_s(self, parts: Sequence[Part], num_sequences: int, num_kv: float) -> float:
        num_prompts = sum(part.num_new for part in parts)
        if num_sequences and self.chunk_s:
            known = sorted(self.chunk_s)
            longer_s = interpolate(known, [self.chunk_s[n] for n in known], num_prompts)
            return self.decode_s(num_sequences, num_kv) + longer_s
        num_new = num_prompts + num_sequences
        ends = [(part.num_before, part.num_before + part.num_new) for part in parts]
        attended = sum(self.attention_s(end) - self.attention_s(begin) for begin, end in ends)
        seconds = self.tokens_s(num_new) + attended
        if not num_sequences:
            return seconds
        return max(self.decode_s(num_sequences, num_kv), seconds + self.kv_read_s * num_kv)

    @property
    def spread(self) -> float:
        """Returns the 99th percentile of decode steps over their mean; 1 when nothing measured."""
        found = [p.p99_seconds / p.seconds for p in self.profile.decode if p.p99_seconds]
        return max(1.0, statistics.fmean(found)) if found else 1.0

    def prompt_s(self, num_new: int, num_prompt: int) -> float:
        """Returns the time of a prompt alone, of which this many tokens are not cached."""
        seconds, done, left = 0.0, num_prompt - num_new, num_new
        while left > 0:
            part = Part(min(left, self.profile.max_batched_tokens), done)
            seconds += self.step_s([part], 0, 0)
            done, left = done + part.num_new, left - part.num_new
        return seconds

    def tokens_per_s(self, num_prompt: int) -> float:
        """Returns the prompt tokens a second under load, when steps are full of prompts like
        this."""
        count = max(1, self.profile.max_batched_tokens // num_prompt)
        if count == 1:
            return num_prompt / self.prompt_s(num_prompt, num_prompt)
        return count * num_prompt / self.step_s([Part(num_prompt, 0)] * count, 0, 0)


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Returns the value at `x` of the line through the points, `xs` rising. Before the first it is
    the first; beyond the last it goes on."""
    if len(xs) == 1:
        return ys[0] * max(1.0, x / xs[0])
    if x <= xs[0]:
        return ys[0]
    index = min(bisect.bisect_left(xs, x), len(xs) - 1)
    low, high = xs[index - 1], xs[index]
    return ys[index - 1] + (ys[index] - ys[index - 1]) * (x - low) / (high - low)


def _attention_s(profile: SpeedProfile) -> tuple[list[float], list[float]]:
    """Finds what attention costs: of measurements whose steps are as full, those with longer
    prompts take longer for each token. Returns lengths of prompts, from 0 on, and the seconds of
    attention of each token, on average: where tokens attend to a window or to chosen ones, long
    prompts cost less than short ones tell. Nothing where nothing tells."""
    full = {
        point.tokens: point.seconds / (point.prompts * point.tokens)
        for point in sorted(profile.prefill, key=lambda point: point.prompts)
        if point.prompts * point.tokens >= profile.max_batched_tokens
    }
    if len(full) < 2:
        return [0.0, 1.0], [0.0, 0.0]
    lengths = sorted(full)
    first, second = lengths[:2]
    slope = max(0.0, (full[second] - full[first]) / (second - first))
    without = full[first] - slope * first
    return [0.0, *map(float, lengths)], [0.0, *_rising([full[n] - without for n in lengths])]


def _kv_read_s(profile: SpeedProfile) -> float:
    """Finds the cost of a token of context in a decode step, of two steps with as many sequences;
    the largest batch that has two tells best. 0 when nothing tells."""
    for count in sorted({point.sequences for point in profile.decode}, reverse=True):
        points = sorted((p.context, p.seconds) for p in profile.decode if p.sequences == count)
        (low, low_s), (high, high_s) = points[0], points[-1]
        if high > low:
            return max(0.0, (high_s - low_s) / (count * (high - low)))
    return 0.0


def _rising(values: Sequence[float]) -> list[float]:
    """Returns them, none below the one before nor below 0: measured times are noisy."""
    found: list[float] = []
    for value in values:
        found.append(max(value, found[-1] if found else 0.0))
    return found
