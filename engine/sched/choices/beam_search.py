"""Beam search over candidates: which answers grow, and which are the best that ended.

    1. `advance` takes the most likely next tokens of each live beam, and returns the beams of the
       next step: whose successors they are, and their tokens
    2. it returns none when the search is over; `best` has the answers then, best first

Scores are sums of log probabilities, and of ended answers the sum / length ** `length_penalty`. The
rules are those of `generate(num_beams=...)` in transformers, so that its users find their answers:
ends count among the first `width` candidates alone, and `early_stopping` says when no better answer
is looked for. Of equal sums the one behind the better beam goes first, then that of the lower
token, whatever device found them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

from engine.contracts.outputs import TokenLogprobs
from engine.contracts.sampling_params import BeamParams


class _Candidate(NamedTuple):
    """One token behind a beam; the least is the best. `loss`: the sum of log probabilities with it,
    negated. `place`: where it is in what was found for the beam."""

    loss: float
    parent: int
    token: int
    place: int


@dataclass(slots=True)
class Hypothesis:
    """One answer, or the beginning of one.

    Attributes:
        score: The sum of log probabilities; of an answer that has ended, by its length.
        token_ids: Those behind the prompt.
        logprobs: Of each token, with the most likely ones at its place.
        parent: The index among the beams before of the one that it continues.
    """

    score: float
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    parent: int = 0


class BeamSearch:
    """The state of one search. `stop_ids` end an answer, but not before `min_tokens`; `max_tokens`
    end all that are left."""

    def __init__(
        self,
        params: BeamParams,
        stop_ids: Collection[int],
        max_tokens: int,
        min_tokens: int = 0,
        num_logprobs: int | None = None,
    ) -> None:
        self._params = params
        self._stop_ids = frozenset(stop_ids)
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._num_logprobs = num_logprobs
        self._num_kept = max(2, 1 + len(self._stop_ids)) * params.width
        self.live = [Hypothesis(0.0)]
        self.best: list[Hypothesis] = []

    @property
    def width(self) -> int:
        return self._params.width

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens of each live beam."""
        return len(self.live[0].token_ids)

    def advance(self, found: Sequence[TokenLogprobs]) -> list[Hypothesis]:
        """Takes the candidates of each live beam, in their order, each beam's most likely first.
        Returns the next beams; none: the search is over."""
        length, width = self.num_tokens + 1, self._params.width
        all_end = length >= self._max_tokens
        ended: list[_Candidate] = []
        going: list[_Candidate] = []
        for place, one in enumerate(islice(self._best_first(found, length), self._num_kept)):
            if not all_end and one.token not in self._stop_ids:
                going.append(one)
            elif place < width:
                ended.append(one)
            if place + 1 >= width and (all_end or len(going) == width):
                break
        self._end(found, ended, length)
        if not going or self._is_over(-going[0].loss, length):
            self.live = []
        else:
            self.live = [self._grown(found, one) for one in going]
        return self.live

    def _best_first(self, found: Sequence[TokenLogprobs], length: int) -> Iterator[_Candidate]:
        """Merges the candidates of all beams, as far as something asks for them."""
        forbidden = self._stop_ids if length <= self._min_tokens else frozenset[int]()
        heap: list[_Candidate] = []
        places = [self._push(heap, index, of, 1, forbidden) for index, of in enumerate(found)]
        while heap:
            best = heappop(heap)
            yield best
            index = best.parent
            places[index] = self._push(heap, index, found[index], places[index], forbidden)

    def _push(
        self,
        heap: list[_Candidate],
        parent: int,
        found: TokenLogprobs,
        place: int,
        forbidden: Collection[int],
    ) -> int:
        """Adds the next candidate of a beam, from `place` on, with all of the same sum, of whose
        order the token decides. Returns the place behind them."""
        score, added = self.live[parent].score, None
        for at in range(place, len(found.token_ids)):
            token, loss = found.token_ids[at], -(score + found.logprobs[at])
            if added is not None and loss != added:
                return at
            if token not in forbidden:
                heappush(heap, _Candidate(loss, parent, token, at))
                added = loss
        return len(found.token_ids)

    def _end(
        self,
        found: Sequence[TokenLogprobs],
        ended: Sequence[_Candidate],
        length: int,
    ) -> None:
        if self._is_full and self._params.early_stopping is True:
            return
        for candidate in ended:
            one = self._grown(found, candidate)
            one.score /= length**self._params.length_penalty
            self.best.append(one)
        self.best.sort(key=lambda one: -one.score)
        del self.best[self._params.width :]

    @property
    def _is_full(self) -> bool:
        return len(self.best) == self._params.width

    def _is_over(self, best_live: float, length: int) -> bool:
        """Returns whether no live beam is looked at any more: there are enough answers, and no
        live beam can become better than the worst of them."""
        if not self._is_full:
            return False
        params = self._params
        if params.early_stopping is True:
            return True
        goes_far = params.early_stopping == "never" and params.length_penalty > 0
        reach = self._max_tokens if goes_far else length
        hoped: float = best_live / reach**params.length_penalty
        return hoped <= self.best[-1].score

    def _grown(self, found: Sequence[TokenLogprobs], candidate: _Candidate) -> Hypothesis:
        loss, parent, token, place = candidate
        beam = self.live[parent]
        logprobs = list(beam.logprobs)
        if self._num_logprobs is not None:
            at, stop = found[parent], 1 + self._num_logprobs
            logprobs.append(
                TokenLogprobs(
                    [token, *at.token_ids[1:stop]],
                    [at.logprobs[place], *at.logprobs[1:stop]],
                    place,
                )
            )
        return Hypothesis(-loss, [*beam.token_ids, token], logprobs, parent)
