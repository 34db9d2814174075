"""One row computes a prompt for several answers, which equal those of requests alone."""

from __future__ import annotations

import msgspec
import pytest

from engine.contracts.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, logprobs=1)
SEEDED = SamplingParams(seed=5, temperature=1.5, logprobs=2)
FILTERED = SamplingParams(
    seed=2**64 - 3, temperature=2.0, top_k=40, top_p=0.95, repetition_penalty=1.3, min_tokens=2
)
CONSTRAINED = SamplingParams(
    seed=9, temperature=3.0, allowed_token_ids=tuple(range(40)), bad_words=((3,), (4,)), logprobs=0
)
KINDS = [GREEDY, SEEDED, FILTERED, CONSTRAINED]


def with_seed(sampling: SamplingParams, seed: int) -> SamplingParams:
    return msgspec.structs.replace(sampling, seed=seed)


@pytest.mark.parametrize("length", [1, 7, 8, 21, 32])
@pytest.mark.parametrize("sampling", KINDS)
def test_answers_are_those_of_requests_alone(driver, make_prompt, length, sampling) -> None:
    """The prompt comes in two chunks, beside a request that decodes. Its answers begin to decode
    together and have blocks of their own only from its last block on."""
    prompt = make_prompt(length, 1)
    seeds = [(sampling.seed + i) % 2**64 for i in range(4)]
    alone = {}
    for seed in seeds:
        driver.add("alone", 0, prompt, with_seed(sampling, seed), eos=(7,))
        driver.step({"alone": length})
        driver.run(11)
        alone[seed] = driver.tokens["alone"][length:]
        assert driver.last.siblings == []
        driver.remove("alone")

    driver.add("beside", 1, make_prompt(5, 2), SEEDED)
    driver.step({"beside": 5})
    driver.add("prompt", 3, prompt, sampling, eos=(7,), sibling_seeds=tuple(seeds[1:]))
    if length > 1:
        driver.step({"prompt": length // 2})
        assert driver.last.siblings == []
    own = driver.step({"prompt": length - length // 2 if length > 1 else 1})["prompt"]
    (found,) = driver.last.siblings
    assert (found.row, found.epoch) == (3, driver.epochs["prompt"])
    first_tokens = [own, *found.tokens.token_ids]
    assert first_tokens == [alone[seed][0] for seed in seeds]

    driver.blocks["prompt"] = driver.remove("prompt", keep_blocks=True)
    for i, seed in enumerate(seeds):
        driver.fork(f"{i}", [0, 2, 4, 5][i], "prompt", first_tokens[i], with_seed(sampling, seed))
    driver.step({f"{i}": 1 for i in range(4)})
    driver.run(10)
    for i, seed in enumerate(seeds):
        assert driver.tokens[f"{i}"][length:] == alone[seed], i


@pytest.mark.parametrize("named", [(), (9, 3)])
def test_log_probabilities_are_those_of_the_raw_logits(driver, make_prompt, named) -> None:
    """More answers than are drawn at once, beside a request that asks for another number."""
    prompt, sampling = make_prompt(12, 3), with_seed(FILTERED, 40)
    sampling = msgspec.structs.replace(sampling, logprobs=2, logprob_token_ids=named)
    seeds = tuple(range(41, 61))
    driver.add("silent", 0, make_prompt(9, 4), FILTERED, sibling_seeds=(1, 2))
    driver.add("beside", 5, make_prompt(3, 4), msgspec.structs.replace(SEEDED, logprobs=4))
    driver.add("prompt", 2, prompt, sampling, eos=(7,), sibling_seeds=seeds)
    driver.step({"silent": 9, "beside": 3, "prompt": 12})
    silent, found = sorted(driver.last.siblings, key=lambda siblings: siblings.row)
    assert (silent.row, silent.tokens.logprobs) == (0, [])
    assert len(silent.tokens.token_ids) == 2
    assert len(set(found.tokens.token_ids)) > 4

    for seed, token, logprobs in zip(
        seeds, found.tokens.token_ids, found.tokens.logprobs, strict=True
    ):
        driver.add("alone", 1, prompt, with_seed(sampling, seed), eos=(7,))
        assert driver.step({"alone": 12})["alone"] == token
        (expected,) = driver.last.logprobs_by_row()[1]
        assert (logprobs.token_ids, logprobs.rank) == (expected.token_ids, expected.rank)
        assert logprobs.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        driver.remove("alone")


def test_a_preempted_prompt_draws_again(driver, make_prompt) -> None:
    prompt = make_prompt(20, 5)
    driver.add("prompt", 0, prompt, SEEDED, sibling_seeds=(6, 7))
    driver.step({"prompt": 12})
    driver.remove("prompt")
    driver.add("other", 0, prompt, SEEDED)
    driver.step({"other": 20})
    assert driver.last.siblings == []
    driver.remove("other")
    driver.add("prompt", 4, prompt, SEEDED, sibling_seeds=(6, 7))
    driver.step({"prompt": 20})
    (found,) = driver.last.siblings
    assert len(found.tokens.token_ids) == 2
