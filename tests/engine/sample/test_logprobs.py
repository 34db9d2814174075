"""Log probabilities are those of the raw logits, whatever the sampler does to them."""

from __future__ import annotations

import pytest
import torch

from engine.contracts.sampling_params import SamplingParams


def test_chosen_and_top_tokens_of_those_who_asked(bench, make_logits) -> None:
    asked = {0: None, 1: 0, 2: 3, 5: 20, 6: None}
    for row, count in asked.items():
        bench.add(row, [1, 2], SamplingParams(seed=row, logprobs=count))
    logits = {row: make_logits(row) for row in asked}
    tokens = bench.step(logits)
    found = bench.logprobs()
    assert sorted(found) == [1, 2, 5]
    for row, result in found.items():
        expected = logits[row].log_softmax(dim=-1)
        top = logits[row].topk(asked[row]).indices.tolist()
        assert result.token_ids == [tokens[row], *top]
        assert result.logprobs == pytest.approx(expected[result.token_ids].tolist(), abs=5e-5)
        assert result.rank == 1 + int((logits[row] > logits[row][tokens[row]]).sum())


def test_tokens_that_a_request_names_come_instead_of_the_likeliest(bench, make_logits) -> None:
    named = {1: (9, 3, 20), 3: (5,)}
    bench.add(0, [1], SamplingParams(seed=0, logprobs=2))
    for row, ids in named.items():
        sampling = SamplingParams(
            seed=row, logprobs=len(ids), logprob_token_ids=ids, logit_bias={9: -5.0}
        )
        bench.add(row, [1, 2], sampling)
    logits = {row: make_logits(row) for row in (0, 1, 3)}
    tokens = bench.step({row: given.clone() for row, given in logits.items()})
    found = bench.logprobs()
    assert found[0].token_ids == [tokens[0], *logits[0].topk(2).indices.tolist()]
    for row, ids in named.items():
        expected = logits[row].log_softmax(dim=-1)
        assert found[row].token_ids == [tokens[row], *ids]
        assert found[row].logprobs == pytest.approx(
            expected[found[row].token_ids].tolist(), abs=5e-5
        )
    bench.remove(1)
    bench.add(1, [1, 2], SamplingParams(seed=1, logprobs=1))
    again = bench.step({row: given.clone() for row, given in logits.items()})
    assert bench.logprobs()[1].token_ids == [again[1], int(logits[1].argmax())]


def test_raw_logits_count_not_the_processed_ones(bench, make_logits) -> None:
    logits = make_logits()
    best = int(logits.argmax())
    sampling = SamplingParams(
        temperature=0.0, logit_bias={7: 100.0, best: -100.0}, repetition_penalty=3.0, logprobs=2
    )
    bench.add(0, [best, 7], sampling)
    bench.add(1, [1], SamplingParams(temperature=0.0, logprobs=1))
    assert bench.step({0: logits.clone(), 1: logits.clone()}) == {0: 7, 1: best}
    expected = logits.log_softmax(dim=-1)
    found = bench.logprobs()
    assert found[0].token_ids == [7, *logits.topk(2).indices.tolist()]
    assert found[0].logprobs == pytest.approx(expected[found[0].token_ids].tolist(), abs=5e-5)
    assert found[0].rank > 1
    assert found[1].token_ids == [best, best]
    assert found[1].rank == 1


def test_nobody_asking_costs_nothing(bench, make_logits) -> None:
    bench.add(0, [1], SamplingParams(seed=3))
    bench.step({0: make_logits()})
    assert bench.last.logprobs is None


def test_impossible_tokens_have_no_probability(bench) -> None:
    logits = torch.full((bench.vocab_size,), -torch.inf)
    logits[9] = 0.0
    bench.add(0, [1], SamplingParams(seed=3, logprobs=1))
    assert bench.step({0: logits}) == {0: 9}
    assert bench.logprobs()[0].logprobs == [0.0, 0.0]
