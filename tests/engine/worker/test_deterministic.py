"""Deterministic mode: a request's tokens and KV do not depend on what else runs."""

from __future__ import annotations

import pytest
import torch

from engine.contracts.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(seed=5, temperature=0.9, top_p=0.95)
BLOCK_SIZE, PROMPT, STEPS = 8, 37, 9


@pytest.fixture
def deterministic(make_runner, make_driver):
    """Returns the runner and its driver."""
    runner = make_runner(deterministic=True)
    return runner, make_driver(lambda step: runner.execute_model(step).get_output())


def kv_of(runner, driver, name: str) -> torch.Tensor:
    """Returns what the request has computed: [layers, 2, heads, tokens, head size]."""
    blocks, count = driver.blocks[name], driver.computed[name]
    layers = [layer[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3) for layer in runner.kv_caches]
    return torch.stack([layer[:, :, :count] for layer in layers])


def alone(
    runner, driver, prompt: list[int], sampling: SamplingParams
) -> tuple[list[int], torch.Tensor]:
    driver.add("alone", 0, prompt, sampling)
    driver.step({"alone": len(prompt)})
    driver.run(STEPS)
    kv = kv_of(runner, driver, "alone")
    driver.remove("alone")
    return driver.tokens["alone"], kv


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_alone_and_in_company(deterministic, make_prompt, sampling) -> None:
    """The request is cut into chunks, beside prompts and decodes, then preempted and
    computed anew.
    """
    runner, driver = deterministic
    prompt = make_prompt(PROMPT, 3)
    tokens, kv = alone(runner, driver, prompt, sampling)

    for row, length in enumerate((50, 3, 20), 1):
        driver.add(str(row), row, make_prompt(length, row), GREEDY)
    driver.add("a", 5, prompt, sampling)
    driver.step({"1": 50, "a": 5})
    driver.step({"a": 31, "2": 3})
    driver.step({"3": 20, "a": 1})
    driver.run(4)
    assert torch.equal(kv_of(runner, driver, "a"), kv[:, :, :, : driver.computed["a"]])
    driver.remove("a")
    known = driver.tokens["a"]
    driver.add("b", 4, known, sampling, prompt_len=PROMPT)
    driver.step({"b": len(known)})
    driver.run(STEPS - (len(known) - PROMPT))
    assert driver.tokens["b"] == tokens
    assert torch.equal(kv_of(runner, driver, "b"), kv)
