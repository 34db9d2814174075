"""The device's choice of beams is the scheduler's, in any company and with any ties."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contracts.outputs import TokenLogprobs
from engine.contracts.sampling_params import BeamParams
from engine.sample.beam_choice import choose_beams
from engine.sched.choices.beam_search import BeamSearch
from engine.sched.choices.beam_seats import seats_of

_VOCABULARY = 24


@st.composite
def searches(draw: st.DrawFn) -> tuple[int, list[tuple[tuple[int, ...], int]]]:
    """Draws a width, and of each search the tokens that end answers, and a seed."""
    width = draw(st.integers(1, 5))
    stops = st.lists(st.integers(0, _VOCABULARY - 1), max_size=3, unique=True)
    one = st.tuples(stops.map(lambda found: tuple(sorted(found))), st.integers(0, 2**31))
    return width, draw(st.lists(one, min_size=1, max_size=4))


def guesses(generator: torch.Generator, count: int) -> list[TokenLogprobs]:
    """Makes candidates as a step tells them, `count` times: many have equal probabilities."""
    made = []
    for _ in range(count):
        tokens = torch.randperm(_VOCABULARY, generator=generator)
        steps = torch.randint(1, 6, (_VOCABULARY,), generator=generator)
        logprobs, order = (steps.float() * -0.3).sort(descending=True)
        found = tokens[order].tolist()
        made.append(TokenLogprobs([found[0], *found], [0.0, *logprobs.tolist()], 1))
    return made


@given(searches())
@settings(deadline=None)
def test_beams_are_those_of_the_scheduler(given_searches) -> None:
    """Follows searches through steps: tokens, sums and seats stay those of `BeamSearch`."""
    width, kinds = given_searches
    generators = [torch.Generator().manual_seed(seed) for _, seed in kinds]
    # Long answers are so much better that no search is over before its last step.
    hosts = [BeamSearch(BeamParams(width, 4.0, "never"), stops, 100) for stops, _ in kinds]
    for host, generator in zip(hosts, generators, strict=True):
        host.advance(guesses(generator, 1))
    seats = [list(range(width)) for _ in hosts]
    scores = torch.tensor([[one.score for one in host.live] for host in hosts], dtype=torch.float64)
    ranks = torch.arange(width).expand(len(hosts), width)
    stop_ids = torch.tensor([[*stops, *[-1] * (3 - len(stops))] for stops, _ in kinds])
    for _ in range(6):
        found = [guesses(generator, width) for generator in generators]
        chosen = choose_beams(
            torch.tensor([[one.token_ids[1:] for one in of] for of in found]),
            torch.tensor([[one.logprobs[1:] for one in of] for of in found], dtype=torch.float32),
            scores,
            ranks,
            stop_ids,
        )
        scores, ranks = chosen.scores, chosen.ranks
        for index, (host, of_seats) in enumerate(zip(hosts, found, strict=True)):
            live = host.advance([of_seats[seat] for seat in seats[index]])
            parents = [seats[index][one.parent] for one in live]
            seats[index] = seats_of(parents)
            for rank, (one, parent, seat) in enumerate(
                zip(live, parents, seats[index], strict=True)
            ):
                assert chosen.token_ids[index, seat] == one.token_ids[-1]
                assert chosen.scores[index, seat] == one.score
                assert chosen.parents[index, seat] == parent
                assert chosen.ranks[index, seat] == rank


@given(
    st.integers(1, 16).flatmap(lambda n: st.lists(st.integers(0, n - 1), min_size=n, max_size=n))
)
def test_no_seat_is_read_and_written(parents: list[int]) -> None:
    seats = seats_of(parents)
    assert sorted(seats) == list(range(len(parents)))
    moved = [(parent, seat) for parent, seat in zip(parents, seats, strict=True) if parent != seat]
    assert {seat for _, seat in moved}.isdisjoint(parents)
    assert len(parents) - len(moved) == len({*parents})
