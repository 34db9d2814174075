"""Beam search over candidates: which answers grow, and which are the best that ended.

    1. `advance` takes the most likely next tokens of each live beam, and returns the beams of the
       next step: whose successors they are, and their tokens
    2. it returns none when the search is over; `best` has the answers then, best first

Scores are sums of log probabilities, and of ended answers the sum / length ** `length_penalty`. The
rules are those of `generate(num_beams=...)` in transformers, so that its users find their answers:
ends count among the first `width` candidates alone, and `early_stopping` says when no better answer
is looked for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.outputs import TokenLogprobs
from engine.sampling_params import BeamParams

EarlyStopping = bool | Literal["never"]


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
    def num_tokens(self) -> int:
        """Returns the number of tokens of each live beam."""
        return len(self.live[0].token_ids)

    def advance(self, found: Sequence[TokenLogprobs]) -> list[Hypothesis]:
        """Takes the candidates of each live beam, in their order, and returns the next ones; none:
        the search is over."""
        length = self.num_tokens + 1
        candidates = self._candidates(found, length)
        hits = [length >= self._max_tokens or c[2] in self._stop_ids for c in candidates]
        width = self._params.width
        ended = [c for c, hit in zip(candidates[:width], hits, strict=False) if hit]
        going = [c for c, hit in zip(candidates, hits, strict=True) if not hit][:width]
        self._end(found, ended, length)
        if not going or self._is_over(going[0][0], length):
            self.live = []
        else:
            self.live = [self._grown(found, candidate) for candidate in going]
        return self.live

    def _candidates(
        self, found: Sequence[TokenLogprobs], length: int
    ) -> list[tuple[float, int, int, int]]:
        """Returns (score, beam, token, place among the beam's), the best first."""
        forbidden = self._stop_ids if length <= self._min_tokens else frozenset[int]()
        candidates = [
            (beam.score + logprob, index, token, place)
            for index, (beam, of_beam) in enumerate(zip(self.live, found, strict=True))
            for place, (token, logprob) in enumerate(
                zip(of_beam.token_ids[1:], of_beam.logprobs[1:], strict=True)
            )
            if token not in forbidden
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        return candidates[: self._num_kept]

    def _end(
        self,
        found: Sequence[TokenLogprobs],
        ended: Sequence[tuple[float, int, int, int]],
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

    def _grown(
        self, found: Sequence[TokenLogprobs], candidate: tuple[float, int, int, int]
    ) -> Hypothesis:
        score, parent, token, place = candidate
        beam = self.live[parent]
        logprobs = list(beam.logprobs)
        if self._num_logprobs is not None:
            at, stop = found[parent], 1 + self._num_logprobs
            logprobs.append(
                TokenLogprobs(
                    [token, *at.token_ids[1:stop]],
                    [at.logprobs[1 + place], *at.logprobs[1:stop]],
                    1 + place,
                )
            )
        return Hypothesis(score, [*beam.token_ids, token], logprobs, parent)
