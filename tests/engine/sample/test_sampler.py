"""Tests what each sampling parameter does to the next token."""

from __future__ import annotations

import pytest
import torch

from engine.contracts.sampling_params import SamplingParams

STEPS = 60
GREEDY = SamplingParams(temperature=0.0)


def params(**fields) -> SamplingParams:  # type: ignore[no-untyped-def]
    return SamplingParams(seed=11, **fields)


def test_greedy_takes_the_likeliest_and_the_lowest_of_equals(bench, make_logits) -> None:
    bench.add(0, [1, 2], GREEDY)
    bench.add(1, [1, 2], SamplingParams(temperature=0.0, top_k=7, top_p=0.3, seed=99))
    logits = make_logits()
    tied = torch.zeros(bench.vocab_size)
    tied[[17, 31, 40]] = 5.0
    best = int(logits.argmax())
    assert bench.step({0: logits, 1: logits}) == {0: best, 1: best}
    assert bench.step({0: tied, 1: logits}) == {0: 17, 1: best}


def test_a_seed_repeats_and_another_differs(bench, make_logits) -> None:
    logits = make_logits(scale=1.0)
    drawn = []
    seeds = [7, 7, 8, 7 + 2**32, 7 + 2**63, 2**64 - 1]
    for row, seed in enumerate(seeds):
        bench.add(row, [1, 2, 3], SamplingParams(seed=seed))
        drawn.append(tuple(bench.run(row, logits, STEPS)))
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == len(set(seeds))
    assert len(set(drawn[0])) > 10


def test_the_draw_follows_the_distribution(bench) -> None:
    """Two tokens of odds 3:1 are drawn over 64 seeds and 8 positions."""
    logits = torch.full((bench.vocab_size,), -torch.inf)
    logits[4], logits[9] = 1.0986123, 0.0
    drawn = []
    for seed in range(64):
        bench.add(0, [1], SamplingParams(seed=seed))
        drawn += bench.run(0, logits, 8)
        bench.remove(0)
    assert set(drawn) == {4, 9}
    share = drawn.count(4) / len(drawn)
    assert abs(share - 0.75) < 0.08  # over four standard deviations


def test_temperature_near_zero_is_nearly_greedy_and_a_high_one_is_not(bench, make_logits) -> None:
    logits = make_logits()
    bench.add(0, [1], params(temperature=0.01))
    bench.add(1, [1], params(temperature=5.0))
    best = int(logits.argmax())
    assert set(bench.run(0, logits, STEPS)) == {best}
    assert len(set(bench.run(1, logits, STEPS))) > 20


@pytest.mark.parametrize("temperature", [1e-6, 1e-37, 1e-45])
def test_the_coldest_draws_take_the_largest(bench, make_logits, temperature) -> None:
    """This holds also where its reciprocal is too large for float32."""
    logits = make_logits()
    bench.add(0, [1], params(temperature=temperature))
    bench.add(1, [1], params(temperature=temperature, top_p=0.9))
    best = int(logits.argmax())
    assert bench.step({0: logits, 1: logits}) == {0: best, 1: best}


def _kept(bench, sampling: SamplingParams, logits: torch.Tensor) -> set[int]:  # type: ignore[no-untyped-def]
    bench.add(0, [1], sampling)
    return set(bench.run(0, logits, STEPS))


def test_top_k_keeps_k_tokens(bench, make_logits) -> None:
    logits = make_logits(scale=0.5)
    kept = _kept(bench, params(top_k=3), logits)
    assert kept == set(logits.topk(3).indices.tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_it(bench) -> None:
    logits = torch.full((bench.vocab_size,), -20.0)
    logits[[3, 5, 8]] = torch.tensor([0.5, 0.3, 0.2]).log()
    assert _kept(bench, params(top_p=0.7), logits) == {3, 5}


def test_min_p_drops_the_much_less_likely(bench) -> None:
    logits = torch.full((bench.vocab_size,), -20.0)
    logits[[3, 5, 8]] = torch.tensor([0.6, 0.3, 0.1]).log()
    assert _kept(bench, params(min_p=0.4), logits) == {3, 5}


def test_logit_bias_is_added_and_can_forbid(bench, make_logits) -> None:
    logits = make_logits()
    best, second = logits.topk(2).indices.tolist()
    bench.add(0, [1], SamplingParams(temperature=0.0, logit_bias={best: -100.0}))
    bench.add(1, [1], SamplingParams(temperature=0.0, logit_bias={7: 100.0, best: 3.0}))
    bench.add(2, [1], GREEDY)
    assert bench.step({0: logits, 1: logits, 2: logits}) == {0: second, 1: 7, 2: best}


@pytest.mark.parametrize("known_output", [0, 2])
def test_ending_tokens_are_masked_before_min_tokens(bench, make_logits, known_output) -> None:
    """This holds also when part of the output came with the request."""
    logits = make_logits()
    eos, stop, other = logits.topk(3).indices.tolist()
    sampling = SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=(stop, eos))
    bench.add(0, [1, 2, 3], sampling, output=[other] * known_output, eos=(eos,))
    tokens = bench.run(0, logits, 6 - known_output)
    assert tokens == [other] * (4 - known_output) + [eos, eos]


def test_min_tokens_and_bias_on_the_same_token(bench, make_logits) -> None:
    logits = make_logits()
    eos, other = logits.topk(2).indices.tolist()
    sampling = SamplingParams(temperature=0.0, min_tokens=1, logit_bias={eos: 50.0})
    bench.add(0, [1], sampling, eos=(eos,))
    assert bench.run(0, logits, 2) == [other, eos]


ALL_KINDS = [
    GREEDY,
    params(),
    params(temperature=0.7, top_p=0.8),
    params(top_k=5),
    params(min_p=0.1, temperature=1.5),
    params(repetition_penalty=1.4, frequency_penalty=0.6),
    params(presence_penalty=1.0, logit_bias={3: 2.0, 4: -2.0}),
    params(min_tokens=5, logprobs=3),
]


def test_a_token_does_not_depend_on_the_rest_of_the_batch(bench, make_logits) -> None:
    """Runs every request alone, then all of them together in rows of another order."""
    alone = []
    for kind in ALL_KINDS:
        bench.add(0, [1, 2, 3], kind, eos=(4,))
        alone.append([bench.step({0: make_logits(seed)})[0] for seed in range(10)])
        bench.remove(0)
    rows = [5, 2, 7, 0, 3, 1, 6, 4]
    for row, kind in zip(rows, ALL_KINDS, strict=True):
        bench.add(row, [1, 2, 3], kind, eos=(4,))
    together: list[list[int]] = [[] for _ in ALL_KINDS]
    for seed in range(10):
        tokens = bench.step({row: make_logits(seed) for row in rows})
        for i, row in enumerate(rows):
            together[i].append(tokens[row])
    assert together == alone


@pytest.mark.parametrize("kind", range(len(ALL_KINDS)))
def test_a_resumed_request_goes_on_as_if_it_had_never_left(bench, make_logits, kind) -> None:
    """A request is preempted after 4 tokens, back in another row with them as part of its prefill.
    The same flat logits at every step, so that what was counted decides.
    """
    sampling = ALL_KINDS[kind]
    prompt = [1, 2, 3]
    logits = make_logits(scale=0.5) + 2.0
    bench.add(0, prompt, sampling, eos=(4,))
    whole = bench.run(0, logits, 12)
    bench.remove(0)
    bench.add(6, prompt, sampling, output=whole[:4], eos=(4,))
    assert bench.run(6, logits, 8) == whole[4:]


def test_a_row_forgets_its_former_owner(bench, make_logits) -> None:
    logits = make_logits()
    best = int(logits.argmax())
    kinds = [*ALL_KINDS, params(logit_bias={best: -100.0}), params(min_tokens=50)]
    for kind in kinds:
        bench.add(3, [5, best], kind, eos=(best,))
        bench.run(3, logits, 3)
        bench.remove(3)
        bench.add(3, [5, best], GREEDY, eos=(best,))
        assert bench.run(3, logits, 3) == [best] * 3
        assert bench.logprobs() == {}
        bench.remove(3)
    assert bench.sampler.penalties.num_used_entries == 0
