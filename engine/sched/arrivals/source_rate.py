"""How quickly one source gives tokens, and when a slow one is tried again.

    1. `verdict`    shall this prefix be taken, or computed?
    2. `took`       it was; this many tokens, this many seconds
       `failed`     it did not come. That counts as a slow take, however soon it was known

What a take costs is a part that each has (connections, questions, the first copy) and one that
grows with its tokens. Takes of different sizes tell them apart; those of one size need not.

- **On trust**: the first two takes, since the first opens connections and touches memory for the
  first time, and counts only until there is another; and one of four times as many tokens as any
  before, since small ones say little about it. Not where it looks hopeless.
- **On credit**: computing a prompt which the source has earns a small part of the time that it
  took. A take that looks slower than computing is tried once that pays for what it will lose: after
  3 prompts at 1.1 times, 25 at twice. A loss that nothing foresaw is paid back first.
- **Good news count at once**: a take much quicker than foreseen forgets those before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

_DECAY = 0.8
"""Weight that a take leaves to those before it."""
_CREDIT = 0.04
"""Part of the time spent on computing that may be lost by tries."""
_MOST_LOST = 2
"""An unforeseen loss counts no more than this many times the time to compute, which 50 prompts
earn: one stall does not make a quick source a slow one for long."""
_FEWEST_BETWEEN = 8
"""Prompts computed before a source that is slower gets another chance, however little it costs."""
_NUM_ON_TRUST = 2
_MUCH_LARGER = 4
_HOPELESS = 8
"""Nothing is taken on trust that looks this many times as slow as computing."""
_MUCH_QUICKER = 0.75
_MUCH_MORE = 1.5
_FAILED = 2
"""A take that failed counts as this many times as slow as computing, if it did not last longer."""
_TELLING_SPREAD = 0.05
"""Variance of sizes, in squares of their mean, from which on they tell the two parts apart."""


class PullDecision(StrEnum):
    """Says why a prefix is taken, or (the last one) computed."""

    QUICKER = "quicker"
    ON_TRUST = "on trust"
    ON_CREDIT = "on credit"
    SLOWER = "slower"

    @property
    def is_to_take(self) -> bool:
        return self is not PullDecision.SLOWER


@dataclass(slots=True)
class _Takes:
    """Sums over takes, the last ones with the largest weight."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, num_tokens: int, seconds: float, keep: float) -> None:
        self.weight = self.weight * keep + 1
        self.tokens = self.tokens * keep + num_tokens
        self.seconds = self.seconds * keep + seconds
        self.squares = self.squares * keep + num_tokens * num_tokens
        self.products = self.products * keep + num_tokens * seconds

    def can_predict(self, num_tokens: int) -> bool:
        """Returns whether the samples predict how long this many tokens take. Samples of one size
        cannot separate latency from rate: they predict at most `_MUCH_MORE` times their size."""
        return self._tells_apart or num_tokens * self.weight <= _MUCH_MORE * self.tokens

    @property
    def _spread(self) -> float:
        return self.weight * self.squares - self.tokens**2

    @property
    def _tells_apart(self) -> bool:
        return self._spread >= _TELLING_SPREAD * self.tokens**2

    @property
    def parts(self) -> tuple[float, float]:
        """Returns the seconds of each take and of each token: the line through what was seen, with
        neither below 0; all by tokens where the sizes are too much alike for that."""
        if not self.tokens:
            return 0.0, 0.0
        by_tokens = self.seconds / self.tokens
        if not self._tells_apart:
            return 0.0, by_tokens
        slope = (self.weight * self.products - self.tokens * self.seconds) / self._spread
        slope = min(max(slope, 0.0), by_tokens)
        return (self.seconds - slope * self.tokens) / self.weight, slope


@dataclass(slots=True)
class SourceRate:
    """Remembers how quickly one source gave tokens, and what trying it may still cost."""

    ask_s: float = 0.0
    num_takes: int = 0
    credit_s: float = 0.0
    num_refusals: int = 0
    """Since the last take."""
    most_tokens: int = 0
    _takes: _Takes = field(default_factory=_Takes)

    def took(self, num_tokens: int, seconds: float, own_seconds: float = 0.0) -> None:
        """Counts tokens that came; to compute them would have taken `own_seconds`, 0 if unknown."""
        foreseen = self.seconds_for(num_tokens) - self.ask_s
        if self.num_takes >= _NUM_ON_TRUST and own_seconds:
            lost = max(0.0, seconds - max(foreseen, own_seconds))
            self.credit_s -= min(lost, _MOST_LOST * own_seconds)
        is_news = seconds < _MUCH_QUICKER * foreseen and self._takes.can_predict(num_tokens)
        is_first = self.num_takes < _NUM_ON_TRUST
        self._takes.add(num_tokens, seconds, 0.0 if is_first or is_news else _DECAY)
        self.num_takes += 1
        self.num_refusals = 0
        self.most_tokens = max(self.most_tokens, num_tokens)

    def failed(self, num_tokens: int, seconds: float, own_seconds: float) -> None:
        """Counts tokens that did not come, which was known after `seconds`, as a slow take,
        and as none that is quicker than those before. Where `own_seconds` is 0 nothing says what
        is slow: it is not counted."""
        if own_seconds:
            foreseen = self.seconds_for(num_tokens) - self.ask_s
            self.took(num_tokens, max(seconds, foreseen, _FAILED * own_seconds), own_seconds)

    @property
    def parts(self) -> tuple[float, float]:
        """Returns the seconds of each take, beside those to ask, and of each token."""
        return self._takes.parts

    def seconds_for(self, num_tokens: int) -> float:
        """Returns how long it takes to get this many tokens; as good as none before the first."""
        setup, each = self.parts
        return self.ask_s + setup + num_tokens * each

    def is_worth(
        self, num_read: int, num_saved: int, own_tokens_per_s: float, *, trusts_larger: bool = True
    ) -> bool:
        """Decides whether `num_read` tokens are read, which saves `num_saved` of computing. As long
        as it is not known how quickly these are computed, they are. `trusts_larger`: takes of much
        fewer tokens say little about these."""
        if not own_tokens_per_s:
            return True
        seconds, own_seconds = self.seconds_for(num_read), num_saved / own_tokens_per_s
        num_tokens = num_read if trusts_larger else 0
        return self.verdict(seconds, own_seconds, num_tokens).is_to_take

    def verdict(self, seconds: float, own_seconds: float, num_tokens: int = 0) -> PullDecision:
        """Decides whether to take what needs `seconds` and saves `own_seconds` of computing, and
        says why. Remembers the answer."""
        if seconds < own_seconds:
            return PullDecision.QUICKER
        is_new = self.num_takes == 1 or num_tokens >= _MUCH_LARGER * self.most_tokens > 0
        if is_new and seconds < own_seconds * _HOPELESS:
            return PullDecision.ON_TRUST
        self.num_refusals += 1
        self.credit_s += _CREDIT * own_seconds
        lost = seconds - own_seconds
        if self.num_refusals <= _FEWEST_BETWEEN or self.credit_s < lost:
            return PullDecision.SLOWER
        self.credit_s = 0.0
        self.num_refusals = 0
        return PullDecision.ON_CREDIT
