"""Penalties count the right tokens, in a pool that grows and is given back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch.buffer_utils import Carrier
from engine.contracts.sampling_params import SamplingParams
from engine.sample.penalties import PenaltyStates
from tests.engine.batch.place_tables import places_of

CPU = torch.device("cpu")
VOCAB, ROWS = 41, 6


def expected_logits(
    logits: torch.Tensor, prompt: list[int], output: list[int], sampling: SamplingParams
) -> torch.Tensor:
    expected = logits.clone()
    for token in set(prompt) | set(output):
        value = float(expected[token])
        factor = sampling.repetition_penalty
        expected[token] = value / factor if value > 0 else value * factor
    for token in set(output):
        expected[token] -= sampling.frequency_penalty * output.count(token)
        expected[token] -= sampling.presence_penalty
    return expected


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@given(
    requests=st.lists(
        st.tuples(
            TOKENS,
            TOKENS,
            TOKENS,
            st.sampled_from([1.0, 0.5, 1.7]),
            st.sampled_from([0.0, 0.9]),
            st.sampled_from([0.0, -0.4]),
        ),
        min_size=1,
        max_size=ROWS,
    )
)
@settings(deadline=None)
def test_logits_equal_the_definition(requests: list[tuple]) -> None:  # type: ignore[type-arg]
    """Requests enter with a prompt and known output, then get more tokens."""
    states = PenaltyStates(ROWS, VOCAB, CPU)
    all_params = []
    for row, (prompt, known, _, repetition, presence, frequency) in enumerate(requests):
        sampling = SamplingParams(
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
        )
        all_params.append(sampling)
        states.add_request(row, sampling, np.array(prompt, np.int32), np.array(known, np.int32))
    Carrier(states.carried, CPU).carry_over()
    for row, (_, _, sampled, *_) in enumerate(requests):
        for token in sampled:
            states.count(torch.tensor([[token, -1]]), torch.tensor([row], dtype=torch.int32))

    rows = np.arange(len(requests), dtype=np.int32)
    logits = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(0))
    expected = torch.stack(
        [
            expected_logits(logits[i], prompt, known + sampled, all_params[i])
            for i, (prompt, known, sampled, *_) in enumerate(requests)
        ]
    )
    assert states.needed_by(rows) == any(p.needs_penalties for p in all_params)
    if states.needed_by(rows):
        states.apply(logits, places_of([], rows.tolist()))
        torch.testing.assert_close(logits, expected)
    for row in range(len(requests)):
        states.remove_request(row)
    assert states.num_used_entries == 0


def test_the_pool_grows_with_need_and_keeps_its_counts() -> None:
    states = PenaltyStates(ROWS, VOCAB, CPU)
    assert states._output_counts.numel() == 0
    sampling = SamplingParams(frequency_penalty=1.0)
    for row in range(ROWS):
        output = np.full(row + 1, row, np.int32)
        states.add_request(row, sampling, np.array([], np.int32), output)
    Carrier(states.carried, CPU).carry_over()
    assert len(states._output_counts) == ROWS
    logits = torch.zeros(ROWS, VOCAB)
    states.apply(logits, places_of([], list(range(ROWS))))
    assert logits.diagonal().tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    assert int((logits != 0).sum()) == ROWS


def test_drafts_before_a_place_count() -> None:
    """A draft counts for the places behind it only, and for no longer than the step."""
    states = PenaltyStates(ROWS, VOCAB, CPU)
    nothing = np.array([], np.int32)
    states.add_request(2, SamplingParams(frequency_penalty=1.0), nothing, np.array([5], np.int32))
    Carrier(states.carried, CPU).carry_over()
    for _ in range(2):
        logits = torch.zeros(3, VOCAB)
        states.apply(logits, places_of([(2, [5, 7, 5])], []))
        assert [logits[place, [5, 7]].tolist() for place in range(3)] == [
            [-1.0, 0.0],
            [-1.0, -1.0],
            [-2.0, -1.0],
        ]
        assert int((logits != 0).sum()) == 5


def test_an_entry_is_clean_for_its_next_owner() -> None:
    states = PenaltyStates(ROWS, VOCAB, CPU)
    sampling = SamplingParams(repetition_penalty=2.0)
    for _ in range(3 * ROWS):
        states.add_request(0, sampling, np.arange(30, dtype=np.int32), np.array([1], np.int32))
        states.remove_request(0)
    states.add_request(0, sampling, np.array([40], np.int32), np.array([], np.int32))
    Carrier(states.carried, CPU).carry_over()
    logits = torch.ones(1, VOCAB)
    states.apply(logits, places_of([], [0]))
    assert logits[0].tolist() == [1.0] * 40 + [0.5]
    assert states.num_used_entries == 1


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_penalty_turns_the_sampler_away_from_repetition(bench, make_logits, field) -> None:
    logits = make_logits(scale=0.2) + 1.0
    best = int(logits.argmax())
    bench.add(0, [1], SamplingParams(temperature=0.0))
    assert bench.run(0, logits, 5) == [best] * 5
    strength = 5.0 if field == "repetition_penalty" else 2.0
    bench.add(1, [1], SamplingParams(temperature=0.0, **{field: strength}))
    assert len(set(bench.run(1, logits, 5))) == 5


def test_repetition_penalty_counts_the_prompt_and_the_others_do_not(bench, make_logits) -> None:
    logits = make_logits() + 20.0
    best, second = logits.topk(2).indices.tolist()
    bench.add(0, [best], SamplingParams(temperature=0.0, repetition_penalty=2.0))
    bench.add(1, [best], SamplingParams(temperature=0.0, presence_penalty=30.0))
    bench.add(2, [best], SamplingParams(temperature=0.0, frequency_penalty=30.0))
    assert bench.step(dict.fromkeys((0, 1, 2), logits)) == {0: second, 1: best, 2: best}
