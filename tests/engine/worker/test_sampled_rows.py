"""Steps whose last layer computes sampled tokens alone give what whole steps give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig, ParallelConfig
from engine.contracts.sampling_params import SamplingParams
from engine.fast_paths import FastPath
from engine.layers.attention.paged import PagedBackend
from engine.lora import LoRAConfig
from engine.models.base import CausalLM
from engine.worker import sampled_rows
from engine.worker.sampled_rows import keeps_sampled_rows
from tests.engine.worker.gpu_workers import conversation, small_config, started

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(seed=5, temperature=0.9, top_p=0.95)
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=2)


class RowsSeen:
    """Counts the rows that the MLPs of the first and the last layer compute."""

    def __init__(self, model: CausalLM) -> None:
        self.first: list[int] = []
        self.last: list[int] = []
        for seen, layer in ((self.first, model.layers[0]), (self.last, model.layers[-1])):
            layer.mlp.register_forward_pre_hook(
                lambda module, inputs, seen=seen: seen.append(len(inputs[0]))
            )


@pytest.fixture(params=["short steps", "long steps"])
def pair(make_runner, make_driver, request, monkeypatch):
    """Returns drivers of a runner without and of one with the path, and what that one computes."""
    graphs: tuple[FastPath, ...] = ()
    if request.param == "long steps":
        monkeypatch.setattr(sampled_rows, "_FEW_TOKENS", 0)
        graphs = ("prompt-graphs",)
    plain = make_runner(disabled_fast_paths=("sampled-rows",))
    kept = make_runner(disabled_fast_paths=graphs)
    rows = RowsSeen(kept._model)
    drivers = [
        make_driver(lambda step, r=r: r.execute_model(step).get_output()) for r in (plain, kept)
    ]
    return *drivers, rows


def converse(driver, make_prompt) -> dict[str, list[int]]:
    """Prompts together, chunks that leave a rest, decodes beside them and by themselves."""
    for row, (name, length) in enumerate({"a": 5, "b": 40, "c": 8}.items()):
        driver.add(name, 5 - row, make_prompt(length, length), (GREEDY, SEEDED)[row % 2])
    driver.step({"a": 5, "c": 8})
    driver.step({"b": 17})
    driver.step({"b": 23})
    driver.run(2)
    return dict(driver.tokens)


def test_tokens_are_those_of_whole_steps(pair, make_prompt) -> None:
    plain, kept, rows = pair
    assert converse(kept, make_prompt) == converse(plain, make_prompt)
    # a and c; a, c and a chunk of b; a, c and the end of b; decodes alone.
    assert rows.first == [13, 2 + 17, 2 + 23, 3, 3]
    assert rows.last == [2, 2, 3, 3, 3]


def test_long_steps_attend_for_sampled_tokens_alone(make_runner, make_driver, make_prompt) -> None:
    """Attention of the last layer, that of the first, and what they see."""
    runner = make_runner(disabled_fast_paths=("prompt-graphs",))
    seen: list[tuple[int, int, list[int]]] = []
    attend = PagedBackend.attend

    def spy(self, spec, heads, kv_cache, metadata):
        seen.append((len(heads), metadata.num_decodes, metadata.seq_lens.tolist()))
        return attend(self, spec, heads, kv_cache, metadata)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampled_rows, "_FEW_TOKENS", 20)
        patch.setattr(PagedBackend, "attend", spy)
        driver = make_driver(lambda step: runner.execute_model(step).get_output())
        driver.add("a", 1, make_prompt(30, 1))
        driver.add("b", 2, make_prompt(25, 2))
        driver.add("c", 3, make_prompt(5, 3))
        driver.step({"a": 30, "b": 9})
        driver.step({"b": 10, "c": 5})
        assert seen[:3] == [(39, 0, [30, 9]), (39, 0, [30, 9]), (1, 1, [30])]
        assert {heads for heads, _, _ in seen[3:]} == {16}, "a short step"


def test_a_step_in_which_nobody_samples_computes_one_row(pair, make_prompt) -> None:
    plain, kept, rows = pair
    for driver in (plain, kept):
        driver.add("a", 1, make_prompt(30, 1))
        assert driver.step({"a": 20}) == {}
        driver.step({"a": 10})
        driver.run(3)
    assert kept.tokens == plain.tokens
    assert rows.last[:2] == [1, 1]


def test_prompts_whose_tokens_are_scored_are_computed_as_a_whole(pair, make_prompt) -> None:
    plain, kept, rows = pair
    found = []
    for driver in (plain, kept):
        driver.add("a", 1, make_prompt(30, 1), SCORED)
        driver.add("b", 2, make_prompt(9, 2))
        driver.step({"a": 30, "b": 9})
        found.append([part.logprobs.unpack() for part in driver.last.prompt_logprobs])
        driver.run(2)
    assert len(found[0][0]) == 29
    assert found[0] == found[1]
    assert kept.tokens == plain.tokens
    assert rows.last[0] == 39


@pytest.mark.parametrize(
    ("what", "keeps"),
    [
        ({}, True),
        ({"lora": LoRAConfig(max_loras=2, max_lora_rank=8)}, False),
        ({"parallel": ParallelConfig(data_parallel_size=2)}, False),
    ],
)
def test_what_counts_on_all_rows_has_them(make_config, make_runner, what, keeps: bool) -> None:
    model = make_runner()._model
    config: EngineConfig = make_config()
    assert keeps_sampled_rows(replace(config, **what), model) is keeps
    disabled = replace(config.device, disabled_fast_paths=("sampled-rows",))
    assert not keeps_sampled_rows(replace(config, device=disabled), model)


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_tokens_on_a_gpu_are_those_of_whole_steps(
    small_weights: Path,
    make_driver,
    make_prompt,
    monkeypatch,
    enforce_eager: bool,
    deterministic: bool,
) -> None:
    """Graphs of prompts; single launches, which attend as in long steps. What the cache holds has
    the same bits."""
    if enforce_eager:
        monkeypatch.setattr(sampled_rows, "_FEW_TOKENS", 0)
    found = []
    for disabled in (("sampled-rows",), ()):
        config = small_config(
            small_weights,
            enforce_eager=enforce_eager,
            deterministic=deterministic,
            disabled_fast_paths=disabled,
        )
        with started(config) as worker:
            tokens = conversation(make_driver(worker.execute_model), make_prompt)
            assert worker.compile_guard.late == []
            found.append((tokens, [layer.clone() for layer in worker.runner.kv_caches]))
    assert found[0][0] == found[1][0]
    for whole, kept in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(whole[1:], kept[1:])
