"""Makes requests from a description: rates, lengths, how much of each prompt is cached."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from planner.errors import TrafficError
from planner.traffic.traffic import MAX_SPAN_S, Arrival, Traffic

_BLOCK_TOKENS = 64
MAX_REQUESTS = 1_000_000
_REGULAR = 1e-3
"""Times between requests that vary by less are all alike; squared, a tiny number would be 0."""
_LENGTHS = re.compile(r"([0-9.]+)(?:~([0-9.]+))?|([0-9.]+)-([0-9.]+)")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Draws lengths: lognormal with `mean` and `cv` (0: all alike), or evenly from `low` to
    `high`."""

    mean: float
    cv: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def draw(self, rng: random.Random) -> int:
        if self.high:
            return max(1, round(rng.uniform(self.low, self.high)))
        if not self.cv:
            return max(1, round(self.mean))
        sigma = math.sqrt(math.log(1 + self.cv**2))
        return max(1, round(rng.lognormvariate(math.log(self.mean) - sigma**2 / 2, sigma)))


def read_lengths(text: str) -> Lengths:
    """Reads `2000`, `2000~0.8` (mean and coefficient of variation) or `100-4000` (even).

    Raises `TrafficError`."""
    found = _LENGTHS.fullmatch(text.strip())
    try:
        if found is None:
            raise ValueError
        mean, cv, low, high = (float(part or 0) for part in found.groups())
    except ValueError:
        raise TrafficError(
            f"{text!r} is no length: write 2000, 2000~0.8 (mean and coefficient of variation) or "
            "100-4000 (even between the two), in tokens"
        ) from None
    if high:
        mean, cv = (low + high) / 2, 0.0
    if not 1 <= mean <= 10_000_000 or (high and not 1 <= low <= high) or cv > 10:
        raise TrafficError(f"{text!r} is no length of 1 to 10 million tokens")
    return Lengths(mean, cv, low, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Describes traffic.

    Attributes:
        rate: Requests in a second.
        hit_share: Part of each prompt that is the same in all of them, and so is soon cached
            everywhere.
        burstiness: Coefficient of variation of the times between requests; 1 is Poisson.
        count: Requests to make.
    """

    rate: float
    prompt: Lengths
    output: Lengths
    hit_share: float = 0.0
    burstiness: float = 1.0
    count: int = 3000
    seed: int = 1

    def traffic(self) -> Traffic:
        """Returns the requests. Raises `TrafficError` when a number makes no sense."""
        self._check()
        rng = random.Random(self.seed)
        arrivals, now = [], 0.0
        for _ in range(self.count):
            num_prompt = self.prompt.draw(rng)
            blocks = range(round(self.hit_share * num_prompt) // _BLOCK_TOKENS)
            arrivals.append(Arrival(now, num_prompt, self.output.draw(rng), "", tuple(blocks)))
            now += self._pause(rng)
        name = f"{self.rate:g} requests/s of {self.prompt.mean:g} tokens in and "
        name += f"{self.output.mean:g} out"
        return Traffic(name, tuple(arrivals), _BLOCK_TOKENS, goes_on=True)

    def _pause(self, rng: random.Random) -> float:
        if self.burstiness < _REGULAR:
            return 1 / self.rate
        shape = 1 / self.burstiness**2
        return rng.gammavariate(shape, 1 / (shape * self.rate))

    def _check(self) -> None:
        if not math.isfinite(self.rate) or self.rate <= 0:
            raise TrafficError(f"--rate {self.rate:g}: it is requests in a second, more than 0")
        if not 0 <= self.hit_share < 1:
            raise TrafficError(
                f"--hit-share {self.hit_share:g}: it is a part of 1, such as 0.3 for 30 %"
            )
        if not 0 <= self.burstiness <= 50:
            raise TrafficError(
                f"--burstiness {self.burstiness:g}: it is a coefficient of variation, 1 for "
                "Poisson arrivals, and at most 50"
            )
        if self.count / self.rate > MAX_SPAN_S:
            raise TrafficError(
                f"--rate {self.rate:g}: {self.count} requests would take "
                f"{self.count / self.rate / 86_400:.0f} days to come, and 400 are the most"
            )
        if self.count > MAX_REQUESTS:
            raise TrafficError(f"--requests {self.count}: at most {MAX_REQUESTS} are simulated")
