"""Chooses how many tokens each decoding row computes in a step, from what steps have cost.

    expected tokens of a row with q a step   1 + share * (a + a^2 + ... + a^(q-1))
    seconds of a step                        median of the latest with as many rows and q

`share` is that of rows which have drafts at all, `a` the probability that a draft is right if those
before it are. The q with the most expected tokens per second is taken, for all rows of a step: 1
where drafts do not pay. No answer depends on the choice.

Of what was never measured nothing knows the cost: a few steps try it. Without drafts nothing is
learnt of them, so a few steps in a hundred draft all the same.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque

from engine.contracts.steps.step_shapes import lengths_up_to

_MIN_STEPS = 3
"""A cost counts once this many steps have shown it; until then it is tried."""
_NUM_KEPT = 15
_DECAY = 0.97
"""Weight that a step leaves to what is known of drafts."""
_PROBE_EVERY = 200
_PROBE_STEPS = 2
_LEAD = 1.02
"""A change must promise this much more than what is."""


class DraftLength:
    """Learns and chooses. `most`: tokens of a row and step at most, its last one and drafts."""

    def __init__(self, most: int) -> None:
        self.lengths = lengths_up_to(most)
        self._seconds: dict[tuple[int, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=_NUM_KEPT)
        )
        self._num_right = self._num_tried = 0.0
        self._num_with = self._num_rows = 0.0
        self._latest = most
        self._since_drafts = 0

    def step_done(self, num_rows: int, length: int, seconds: float) -> None:
        """Learns from a step in which `num_rows` rows computed `length` tokens each, and nothing
        else was computed."""
        self._seconds[_size(num_rows), length].append(seconds)

    def drafts_checked(self, counts: list[int], num_tokens: list[int]) -> None:
        """Learns from a step whose requests had `counts` drafts and got `num_tokens` tokens."""
        if not any(counts):
            return
        for name in ("_num_right", "_num_tried", "_num_with", "_num_rows"):
            setattr(self, name, getattr(self, name) * _DECAY)
        for count, tokens in zip(counts, num_tokens, strict=True):
            self._num_rows += 1
            if count > 0:
                right = max(0, min(count, tokens - 1))
                self._num_with += 1
                self._num_right += right
                self._num_tried += min(count, right + 1)

    def expected_tokens(self, length: int) -> float:
        """Returns how many tokens a row gets from a step, as far as is known."""
        if self._num_tried == 0:
            return float(length)
        right, share = self._num_right / self._num_tried, self._num_with / self._num_rows
        return 1.0 + share * sum(right**place for place in range(1, length))

    def choose(self, num_rows: int) -> int:
        """Returns the tokens that each row shall compute in the next step."""
        size = _size(num_rows)
        for length in self.lengths:
            if len(self._seconds[size, length]) < _MIN_STEPS:
                return self._take(length)
        self._since_drafts += 1
        if self._since_drafts >= _PROBE_EVERY:
            if self._since_drafts >= _PROBE_EVERY + _PROBE_STEPS:
                self._since_drafts = 0
            return self.lengths[1]
        speeds = {
            length: self.expected_tokens(length) / statistics.median(self._seconds[size, length])
            for length in self.lengths
        }
        best = max(speeds, key=speeds.__getitem__)
        if speeds[best] < _LEAD * speeds[self._latest]:
            best = self._latest
        return self._take(best)

    def _take(self, length: int) -> int:
        self._latest = length
        if length > 1:
            self._since_drafts = 0
        return length


def _size(num_rows: int) -> int:
    """Returns what batches are distinguished by: powers of two."""
    return num_rows.bit_length()
