"""Which beams go on, and which answers are best, against the rules written down plainly."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.contracts.outputs import TokenLogprobs
from engine.contracts.sampling_params import BeamParams
from engine.sched.choices.beam_search import BeamSearch

Found = tuple[float, list[int]]
"""The score of an answer, and its tokens."""


class Model:
    """Gives each beginning its own log probabilities, many of which are equal: multiples of 1/8,
    whose sums are exact."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed, self._vocab_size = seed, vocab_size

    def __call__(self, tokens: list[int]) -> list[float]:
        rng = random.Random(f"{self._seed} {tokens}")
        return [-rng.randrange(1, 24) / 8 for _ in range(self._vocab_size)]

    def candidates(self, tokens: list[int]) -> TokenLogprobs:
        """Returns all tokens by their value; a device may give equal ones in any order."""
        logprobs, ids = self(tokens), list(range(self._vocab_size))
        random.Random(self._seed).shuffle(ids)
        ids.sort(key=lambda token: -logprobs[token])
        ids.insert(0, ids[0])
        return TokenLogprobs(ids, [logprobs[token] for token in ids], 1)


def plainly(
    model: Model, params: BeamParams, stops: set[int], most: int, least: int
) -> list[Found]:
    """Sorts the whole vocabulary behind each beam, at every step."""
    width, penalty = params.width, params.length_penalty
    live: list[Found] = [(0.0, [])]
    best: list[Found] = []
    for length in range(1, most + 1):
        every = [
            (-(score + logprob), beam, token)
            for beam, (score, tokens) in enumerate(live)
            for token, logprob in enumerate(model(tokens))
            if length > least or token not in stops
        ]
        kept = sorted(every)[: max(2, 1 + len(stops)) * width]
        grown = [(-loss, [*live[beam][1], token]) for loss, beam, token in kept]
        hits = [length == most or tokens[-1] in stops for _, tokens in grown]
        if not (params.early_stopping is True and len(best) == width):
            ended = zip(grown[:width], hits[:width], strict=True)
            best += [(one[0] / length**penalty, one[1]) for one, hit in ended if hit]
            best = sorted(best, key=lambda one: -one[0])[:width]
        live = [one for one, hit in zip(grown, hits, strict=True) if not hit][:width]
        if not live:
            break
        reach = most if params.early_stopping == "never" and penalty > 0 else length
        hoped = live[0][0] / reach**penalty
        if len(best) == width and (params.early_stopping is True or hoped <= best[-1][0]):
            break
    return best


@pytest.mark.parametrize("seed", range(60))
def test_answers_are_those_of_a_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    model = Model(seed, vocab_size=rng.choice((7, 40)))
    width = rng.choice((1, 2, 3, 5))
    early: Any = rng.choice((True, False, "never"))
    params = BeamParams(width, rng.choice((1.0, 0.0, -1.5, 2.0)), early)
    stops = set(rng.sample(range(7), rng.choice((0, 1, 3))))
    most, least = rng.randrange(1, 9), rng.choice((0, 0, 2))
    search = BeamSearch(params, stops, most, least)
    while search.live:
        parents = search.live
        found = [model.candidates(beam.token_ids) for beam in parents]
        for beam in search.advance(found):
            assert beam.token_ids[:-1] == parents[beam.parent].token_ids
    answers = [(one.score, one.token_ids) for one in search.best]
    assert answers == plainly(model, params, stops, most, least)


def test_of_equal_ones_the_better_beam_and_the_lower_token_go_first() -> None:
    """In whatever order a device gave tokens of one value."""
    search = BeamSearch(BeamParams(3), (), max_tokens=9, num_logprobs=2)
    first = search.advance([TokenLogprobs([5, 5, 9, 3, 7], [-1.0] * 5, 1)])
    assert [(one.parent, one.token_ids) for one in first] == [(0, [3]), (0, [5]), (0, [7])]
    assert [one.logprobs[0].rank for one in first] == [3, 1, 4]
    of_beams = [
        TokenLogprobs([8, 8, 6, 1], [-1.0, -1.0, -2.0, -2.0], 1),
        TokenLogprobs([4, 4, 2, 0], [-1.0, -1.0, -1.0, -3.0], 1),
        TokenLogprobs([0, 0, 1, 2], [-1.5, -1.5, -1.5, -1.5], 1),
    ]
    found = search.advance(of_beams)
    assert [(one.parent, one.token_ids[-1]) for one in found] == [(0, 8), (1, 2), (1, 4)]
    found = search.advance(of_beams)
    assert [(one.parent, one.token_ids[-1]) for one in found] == [(0, 8), (1, 2), (1, 4)]


def test_sums_that_rounding_made_equal_go_by_token() -> None:
    """Behind a beam that is very unlikely, sums are equal that a device told apart."""
    search = BeamSearch(BeamParams(2), (), max_tokens=9)
    first, _ = search.advance([TokenLogprobs([1, 1, 2], [-1e17] * 3, 1)])
    assert first.score - 1.0 == first.score - 2.0
    found = TokenLogprobs([9, 9, 4], [-1.0, -1.0, -2.0], 1)
    chosen = search.advance([found, found])
    assert [(one.parent, one.token_ids[-1]) for one in chosen] == [(0, 4), (0, 9)]
