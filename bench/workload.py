"""Sessions that look like real traffic: when they come, how long their prompts and answers are.

A session is a conversation. Its first prompt is drawn from a table of lengths; each later prompt
is the one before, plus the answer, plus new tokens. Sessions arrive at random, independently of
how fast the server is; inside a session the next turn follows a pause after the answer, because
nothing replies to what has not been said.

`workloads.toml` holds quantiles of published production traces: `conversation` and `agent` follow
the traces of Mooncake (12 031 and 23 608 requests of one hour), `chat-short` that of Azure (2023).
Between two quantiles lengths are interpolated in the logarithm. Everything follows from the seed.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution of lengths. `points`: (percent, length), from 0 to 100, both rising."""

    points: tuple[tuple[float, float], ...]

    def draw(self, rng: random.Random) -> int:
        """Draws a length of at least 1."""
        percent = rng.random() * 100
        index = bisect.bisect_right([p for p, _ in self.points], percent) - 1
        index = min(index, len(self.points) - 2)
        (low, short), (high, long) = self.points[index], self.points[index + 1]
        part = (percent - low) / (high - low)
        return max(1, round(short * (long / short) ** part))


def exactly(length: int) -> Quantiles:
    return Quantiles(((0, length), (100, length)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The shape of a workload.

    Attributes:
        first: Length of a session's first prompt, without the shared part.
        output: Tokens of an answer.
        new: Tokens that the user adds in each later turn.
        turns: (number of turns, share of sessions).
        pause_median_s, pause_sigma: Lognormal pause before each later turn.
        shared_tokens: Opening (system prompt) that sessions have in common.
        shared_fraction: The part of sessions that have it.
        arrival_cv: Spread of the times between sessions: 1 is Poisson, more comes in bursts.
        flash: (begin, end, factor) of a crowd, in parts of the duration.
        max_prompt: Sessions end before a prompt would grow beyond it.
    """

    description: str
    first: Quantiles
    output: Quantiles
    new: Quantiles = field(default_factory=lambda: exactly(1))
    turns: tuple[tuple[int, float], ...] = ((1, 1.0),)
    pause_median_s: float = 0.0
    pause_sigma: float = 1.05
    shared_tokens: int = 0
    shared_fraction: float = 1.0
    arrival_cv: float = 1.0
    flash: tuple[float, float, float] | None = None
    max_prompt: int = 126_000

    @property
    def mean_turns(self) -> float:
        return sum(n * share for n, share in self.turns) / sum(share for _, share in self.turns)


@dataclass(frozen=True, slots=True)
class Turn:
    """`pause_s` after the answer before it; `new_tokens` more prompt than prompt and answer."""

    pause_s: float
    new_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """`start_s` since the beginning of the run. The first turn's prompt begins with
    `shared_tokens` tokens that are the same in all sessions that have any."""

    session_id: str
    start_s: float
    shared_tokens: int
    turns: tuple[Turn, ...]


def sessions(
    preset: Preset, requests_per_s: float, duration_s: float, seed: int
) -> Iterator[Session]:
    """Returns the sessions of one run, in order of arrival, at `requests_per_s` turns a second on
    average if pauses are short against the run.
    """
    rng = random.Random(seed)
    now = 0.0
    for number in itertools.count():
        now += _time_to_next(preset, rng, requests_per_s / preset.mean_turns, now / duration_s)
        if now >= duration_s:
            return
        yield make_session(preset, rng, f"s{seed}-{number}", now)


def make_session(preset: Preset, rng: random.Random, session_id: str, start_s: float) -> Session:
    shared = preset.shared_tokens if rng.random() < preset.shared_fraction else 0
    prompt = min(shared + preset.first.draw(rng), preset.max_prompt)
    shared = min(shared, prompt - 1)
    turns = [Turn(0.0, prompt - shared, preset.output.draw(rng))]
    for _ in range(_num_turns(preset, rng) - 1):
        new = preset.new.draw(rng)
        prompt += turns[-1].output_tokens + new
        if prompt > preset.max_prompt:
            break
        turns.append(Turn(_pause(preset, rng), new, preset.output.draw(rng)))
    return Session(session_id, start_s, shared, tuple(turns))


def _time_to_next(preset: Preset, rng: random.Random, rate: float, progress: float) -> float:
    if preset.flash is not None and preset.flash[0] <= progress < preset.flash[1]:
        rate *= preset.flash[2]
    if preset.arrival_cv == 1.0:
        return rng.expovariate(rate)
    shape = 1 / preset.arrival_cv**2
    return rng.gammavariate(shape, 1 / (shape * rate))


def _num_turns(preset: Preset, rng: random.Random) -> int:
    counts, shares = zip(*preset.turns, strict=True)
    return int(rng.choices(counts, shares)[0])


def _pause(preset: Preset, rng: random.Random) -> float:
    if preset.pause_median_s == 0.0:
        return 0.0
    return math.exp(rng.gauss(math.log(preset.pause_median_s), preset.pause_sigma))


def _presets() -> dict[str, Preset]:
    tables = tomllib.loads(Path(__file__).with_name("workloads.toml").read_text())
    found = {}
    for name, table in tables.items():
        fields = tables.get(table.get("base"), {}) | table
        lengths = {
            key: {"points": fields[key]} for key in ("first", "output", "new") if key in fields
        }
        found[name] = msgspec.convert(fields | lengths, Preset)
    return found


PRESETS = _presets()
