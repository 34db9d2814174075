"""Ranks that have a part of the vocabulary each find what one has that sees all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.contracts.outputs import TokenLogprobs
from engine.contracts.sampling_params import SamplingParams
from engine.layers.vocabulary.vocab_part import VocabPart
from tests.engine.sample.conftest import ROWS, SamplerBench
from tests.engine.sample.rank_threads import Ranks, ThreadGroup, part_of

CPU = torch.device("cpu")
VOCAB = 211
"""Cut in 128 and 83, or in 64, 64, 64 and 19."""
STEPS = 3
TOKENS = st.integers(0, VOCAB - 1)
CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.sampled_from([1.0, 1.4]),
    "presence_penalty": st.sampled_from([0.0, 1.5]),
    "frequency_penalty": st.sampled_from([0.0, -2.0]),
    "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, 1.5, 4.0]), max_size=9),
    "allowed_token_ids": st.none() | st.sets(TOKENS, min_size=1).map(tuple),
    "min_tokens": st.sampled_from([0, 2]),
}
WHOLE: dict[str, st.SearchStrategy[Any]] = {
    "logprobs": st.sampled_from([0, 1, 5, 20]),
    "top_p": st.just(0.8),
    "top_k": st.just(7),
    "min_p": st.just(0.05),
    "bad_words": st.lists(TOKENS, min_size=1).map(lambda last: tuple((one,) for one in last)),
    "no_repeat_ngram_size": st.sampled_from([1, 2]),
}
"""Makes steps gather logits."""


@dataclass(frozen=True)
class Case:
    """Rows by what they want, and what their logits are drawn from. `is_even`: many are equal."""

    rows: list[dict[str, Any]]
    seed: int
    is_even: bool
    needs_whole: bool


@dataclass
class Found:
    """Holds what one rank has chosen in each step, and how many bytes it gave to the others."""

    tokens: list[dict[int, int]] = field(default_factory=list)
    logprobs: list[dict[int, TokenLogprobs]] = field(default_factory=list)
    num_bytes: int = 0


class PartBench(SamplerBench):
    """Samples from this rank's part of the logits; without a group, from all of them."""

    def __init__(self, group: ThreadGroup | None) -> None:
        is_cut = group is not None
        super().__init__(CPU, splits_vocabulary=is_cut, vocab_size=VOCAB)
        self._group = group

    def given(self, logits: Tensor) -> Tensor | VocabPart:
        return logits if self._group is None else part_of(logits, self._group)


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    found = {size: Ranks(size) for size in (2, 4)}
    yield found
    for one in found.values():
        one.close()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    one = st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**64 - 1),
            "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        },
        optional=CHANGES,
    )
    rows = draw(st.lists(one, min_size=1, max_size=ROWS))
    needs_whole = draw(st.integers(0, 7)) == 0
    if needs_whole:
        more = draw(st.sampled_from(sorted(WHOLE)))
        rows[-1] = {**rows[-1], more: draw(WHOLE[more])}
    return Case(rows, draw(st.integers(0, 2**32)), draw(st.booleans()), needs_whole)


def logits_of(case: Case) -> list[dict[int, Tensor]]:
    """Returns the logits [V] of each step and row."""
    generator = torch.Generator().manual_seed(case.seed)
    found = 3 * torch.randn(STEPS, len(case.rows), VOCAB, generator=generator)
    found = found.round() if case.is_even else found
    return [dict(enumerate(step)) for step in found.unbind()]


def run(case: Case, group: ThreadGroup | None) -> Found:
    bench, found = PartBench(group), Found()
    for row, asked in enumerate(case.rows):
        bench.add(row, [1 + row, 100, 200], SamplingParams(**asked), eos=(5, 77, 130, 209))
    for logits in logits_of(case):
        found.tokens.append(bench.step(logits))
        found.logprobs.append(bench.logprobs())
    found.num_bytes = 0 if group is None else group.num_bytes
    return found


@pytest.mark.parametrize("size", [2, 4])
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_tokens_and_log_probabilities_are_those_of_whole_logits(
    ranks: dict[int, Ranks], size: int, case: Case
) -> None:
    alone = run(case, None)
    of_ranks = ranks[size].play(lambda group: run(case, group))
    assert all(one == of_ranks[0] for one in of_ranks), "ranks must agree in every bit"
    found = of_ranks[0]
    assert found.tokens == alone.tokens
    assert found.logprobs == alone.logprobs
    width = -(-VOCAB // (64 * size)) * 64
    most = STEPS * len(case.rows) * width * 4
    assert found.num_bytes == most if case.needs_whole else found.num_bytes < most


@pytest.mark.parametrize("size", [2, 4])
def test_of_equal_logits_the_lowest_token_is_drawn(ranks: dict[int, Ranks], size: int) -> None:
    """Equal ones on both sides of each cut."""
    logits = torch.zeros(1, VOCAB)
    logits[:, [3, 63, 64, 127, 128, 191, 192, 210]] = 4.0
    zeros, seeds = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    drawn = ranks[size].play(lambda group: part_of(logits, group).best(zeros, seeds, seeds))
    assert [tokens.tolist() for tokens in drawn] == [[3]] * size


def test_parts_without_any_token_left(ranks: dict[int, Ranks]) -> None:
    """All tokens of one rank are forbidden, and then all of all ranks."""
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[0, 150] = -3.0
    warm, numbers = torch.tensor([1.0, 1.0]), torch.tensor([4, 5])
    for tokens in ranks[2].play(lambda group: part_of(logits, group).best(warm, numbers, numbers)):
        assert tokens.tolist() == [150, 0]


@pytest.mark.parametrize(
    ("asked", "needs_whole"),
    [
        ({}, False),
        ({"repetition_penalty": 1.2}, False),
        ({"logit_bias": {4: 1.0}}, False),
        ({"allowed_token_ids": (1, 2)}, False),
        ({"min_tokens": 3}, False),
        ({"logprobs": 2}, True),
        ({"bad_words": ((4,),)}, True),
        ({"no_repeat_ngram_size": 2}, True),
        ({"min_p": 0.1}, True),
    ],
)
def test_which_steps_gather(asked: dict[str, Any], needs_whole: bool) -> None:
    bench = SamplerBench(CPU, splits_vocabulary=True)
    bench.add(0, [1], SamplingParams(temperature=1.0, **asked))
    assert bench.sampler.needs_whole(np.array([0], np.int32)) == needs_whole
