"""Allowed tokens and bad words: what may be chosen, in every place, whatever else is asked for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contracts.sampling_params import SamplingParams
from engine.sample.allowed_tokens import AllowedTokenStates
from engine.sample.bad_words import BadWordStates
from tests.engine.sample.conftest import SamplerBench

CPU = torch.device("cpu")
VOCAB, ROWS, LENGTH = 7, 4, 24
Words = tuple[tuple[int, ...], ...]


def forbidden_after(words: Words, output: list[int]) -> set[int]:
    """Returns by definition the last token of each word whose beginning ends the output."""
    found = {
        word[-1]
        for word in words
        if len(output) >= len(word) - 1 and output[len(output) - len(word) + 1 :] == list(word[:-1])
    }
    return found if len(found) < VOCAB else set()


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)
WORDS = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple), max_size=5
).map(tuple)


@given(requests=st.lists(st.tuples(TOKENS, TOKENS, WORDS), min_size=1, max_size=ROWS))
@settings(deadline=None)
def test_every_place_forbids_what_completes_a_word(
    requests: list[tuple[list[int], list[int], Words]],
) -> None:
    """Asks for all places of an output at once, which several tokens a step ask for, and one at a
    time.
    """
    table = torch.zeros((ROWS, LENGTH), dtype=torch.int32)
    states = BadWordStates(ROWS, table)
    places, lengths, expected = [], [], []
    for row, (prompt, output, words) in enumerate(requests):
        table[row, : len(prompt) + len(output)] = torch.tensor([*prompt, *output])
        states.add_request(row, SamplingParams(bad_words=words), len(prompt))
        for known in range(len(output) + 1):
            places.append(row)
            lengths.append(len(prompt) + known)
            expected.append(forbidden_after(words, output[:known]))
    rows, seq_lens = np.array(places, np.int32), torch.tensor(lengths, dtype=torch.int32)
    assert states.needed_by(rows) == any(words for _, _, words in requests)
    if not states.needed_by(rows):
        return
    logits = torch.arange(float(VOCAB)).repeat(len(places), 1)
    states.apply(logits, rows, seq_lens)
    found = [set(torch.nonzero(row == -torch.inf).flatten().tolist()) for row in logits]
    assert found == expected
    assert all((row == -torch.inf).any() or row[2] == 2.0 for row in logits), "no other change"
    for place, (row, length) in enumerate(zip(places, lengths, strict=True)):
        alone = np.array([row], np.int32)
        if states.needed_by(alone):
            one = torch.arange(float(VOCAB)).unsqueeze(0)
            states.apply(one, alone, torch.tensor([length], dtype=torch.int32))
            assert torch.equal(one[0], logits[place])


def test_the_prompt_does_not_begin_a_word(bench, make_logits) -> None:
    logits = torch.zeros(bench.vocab_size)
    logits[[5, 6]] = torch.tensor([2.0, 1.0])
    bench.add(0, [4], SamplingParams(temperature=0.0, bad_words=((4, 5), (5, 5))))
    bench.add(1, [9], SamplingParams(temperature=0.0, bad_words=((4, 5), (5, 5))), output=[4])
    assert bench.step({0: logits, 1: logits}) == {0: 5, 1: 6}
    assert bench.step({0: logits, 1: logits}) == {0: 6, 1: 5}
    assert bench.step({0: logits, 1: logits}) == {0: 5, 1: 6}


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_words_are_never_said_and_others_still_are(bench, make_logits, temperature) -> None:
    """This holds beside rows that ask for nothing, and one that comes back after a preemption."""
    words = ((3,), (7, 7), (7, 8), (9, 8, 7))
    sampling = SamplingParams(temperature=temperature, seed=4, bad_words=words)
    free = SamplingParams(temperature=temperature, seed=4)
    logits = torch.full((bench.vocab_size,), -torch.inf)
    logits[[3, 7, 8, 9]] = torch.tensor([3.0, 2.0, 1.5, 1.0])
    bench.add(0, [1, 9, 8], sampling)
    bench.add(1, [1, 9, 8], free)
    said: list[int] = []
    unlimited: list[int] = []
    for _ in range(12):
        step = bench.step({0: logits, 1: logits})
        said.append(step[0])
        unlimited.append(step[1])
    bench.remove(0)
    bench.add(2, [1, 9, 8], sampling, output=said)
    said += bench.run(2, logits, 12)
    triples = zip(said, said[1:], said[2:], strict=False)
    assert 3 not in said and 3 in unlimited
    assert not {(7, 7), (7, 8)} & set(pairwise(said))
    assert (9, 8, 7) not in set(triples)
    assert len(set(said)) > 1


def test_words_that_leave_nothing_do_not_apply(bench) -> None:
    logits = torch.arange(float(bench.vocab_size))
    allowed = SamplingParams(temperature=0.0, allowed_token_ids=(5, 6), bad_words=((5,), (6, 6)))
    bench.add(0, [1], allowed)
    assert bench.run(0, logits, 3) == [6, 6, 6]


@pytest.mark.parametrize(
    "others",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 2.0, "top_p": 0.7, "repetition_penalty": 3.0},
        {"temperature": 1.0, "logit_bias": {4: 100.0}, "min_tokens": 30},
    ],
)
def test_only_allowed_tokens_are_chosen(bench, make_logits, others) -> None:
    logits = make_logits()
    best_first = logits.argsort(descending=True).tolist()
    allowed = tuple(token for token in best_first[10:16] if token not in (4, 2))
    bench.add(0, [1], SamplingParams(seed=3, allowed_token_ids=allowed, **others), eos=(2,))
    bench.add(1, [1], SamplingParams(temperature=0.0))
    for _ in range(30):
        step = bench.step({0: logits, 1: logits})
        assert step[0] in allowed
        assert step[1] == best_first[0], "the row beside it may use all tokens"


def test_log_probabilities_are_of_the_models_own_logits(bench, make_logits) -> None:
    logits = make_logits()
    best, second = logits.argsort(descending=True).tolist()[:2]
    limits = {"allowed_token_ids": (best, second), "bad_words": ((best,),)}
    bench.add(0, [1], SamplingParams(temperature=0.0, logprobs=1, **limits))
    assert bench.step({0: logits}) == {0: second}
    found = bench.logprobs()[0]
    expected = logits.log_softmax(0)
    assert found.token_ids == [second, best] and found.rank == 2
    assert found.logprobs == pytest.approx(expected[[second, best]].tolist(), abs=1e-5)


@pytest.mark.parametrize("limit", [{"allowed_token_ids": (1, 2)}, {"bad_words": ((1, 2),)}])
def test_other_rows_keep_the_graph_of_the_whole_step(bench, limit) -> None:
    bench.add(0, [1], SamplingParams())
    bench.add(1, [1], SamplingParams(**limit))
    only_draws = bench.sampler.only_draws
    assert only_draws(np.array([0], np.int32))
    assert not only_draws(np.array([0, 1], np.int32))
    bench.remove(1)
    bench.add(1, [1], SamplingParams())
    assert only_draws(np.array([0, 1], np.int32))


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
@pytest.mark.parametrize("splits_vocabulary", [False, True])
def test_ranks_with_parts_of_the_vocabulary_cut_no_distribution(cut, splits_vocabulary) -> None:
    """Such steps gather logits, since what a row keeps depends on all of them."""
    bench = SamplerBench(CPU, splits_vocabulary=splits_vocabulary)
    bench.add(0, [1], SamplingParams())
    bench.add(1, [1], SamplingParams(**cut))
    assert bench.sampler.only_draws(np.array([0], np.int32))
    assert bench.sampler.only_draws(np.array([0, 1], np.int32)) != splits_vocabulary


def test_the_pool_of_masks_grows_and_is_given_back() -> None:
    states = AllowedTokenStates(ROWS, VOCAB, CPU)
    rows = np.arange(ROWS, dtype=np.int32)
    for turn in range(3):
        for row in range(ROWS):
            states.add_request(row, SamplingParams(allowed_token_ids=((row + turn) % VOCAB,)))
        logits = torch.zeros(ROWS, VOCAB)
        states.apply(logits, rows)
        assert logits.argmax(dim=1).tolist() == [(row + turn) % VOCAB for row in range(ROWS)]
        assert int((logits == 0).sum()) == ROWS
        for row in range(ROWS):
            states.remove_request(row)
        assert not states.needed_by(rows)
    assert len(states._masks) == ROWS
