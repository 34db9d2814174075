"""Beam search gives the answers of transformers' `generate(num_beams=...)`, token for token."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import BeamParams, SamplingParams
from engine.models.checkpoint import load_model_config
from tests.engine.models.parity_cases import prompts
from tests.engine.models.reference_models import FAMILIES, reference, save_checkpoint
from tests.engine.worker.one_engine import OneEngine

EOS = tuple(range(40, 48))
"""There are several: a model with random weights hardly ever gives one of them alone."""
MAX_TOKENS = 12
PROMPTS = prompts()[:3]
BEAMS = [
    BeamParams(4, length_penalty, early_stopping)
    for length_penalty, early_stopping in itertools.product(
        (1.0, 0.0, -1.5, 2.0), (False, True, "never")
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beams") / "llama"
    save_checkpoint(FAMILIES["llama"], folder)
    return folder


def make_engine(folder: Path, **changes: Any) -> OneEngine:
    rows, blocks = changes.pop("rows", 8), changes.pop("num_blocks", 64)
    config = EngineConfig(
        engine_id="beams",
        epoch=1,
        model=load_model_config(folder, max_model_len=80),
        cache=CacheConfig(block_size=8, num_blocks=blocks, **changes.pop("cache", {})),
        scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=64),
        device=DeviceConfig(device="cpu"),
    )
    return OneEngine(config, changes.pop("depth", 2))


def asked(name: str, prompt: list[int], beam: BeamParams, n: int = 1, **more: Any) -> Any:
    sampling = SamplingParams(**{"max_tokens": MAX_TOKENS, "temperature": 0.0, "beam": beam} | more)
    return EngineCoreRequest(
        request_id=name,
        spec=RequestSpec(prompt, sampling, sibling_seeds=tuple(range(1, n))),
        eos_token_ids=EOS,
        choice_ids=tuple(f"{name}.{i}" for i in range(n)) if n > 1 else (),
    )


@cache
def expected(
    folder: Path, prompt: int, beam: BeamParams, n: int, max_tokens: int = MAX_TOKENS
) -> list[list[int]]:
    ids = torch.tensor([PROMPTS[prompt]])
    found = reference(folder).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=beam.width,
        num_return_sequences=n,
        length_penalty=beam.length_penalty,
        early_stopping=beam.early_stopping,
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=list(EOS),
        pad_token_id=0,
    )
    return [_cut(row[len(PROMPTS[prompt]) :].tolist()) for row in found]


def _cut(tokens: list[int]) -> list[int]:
    """Returns what comes before the padding."""
    ends = [i for i, token in enumerate(tokens) if token in EOS]
    return tokens[: ends[0] + 1] if ends else tokens


def check(engine: OneEngine, name: str, wanted: list[list[int]]) -> None:
    names = [f"{name}.{i}" for i in range(len(wanted))] if len(wanted) > 1 else [name]
    assert [engine.tokens[one] for one in names] == wanted, name
    for one, tokens in zip(names, wanted, strict=True):
        assert engine.ended[one] == ("stop" if tokens[-1] in EOS else "length")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rows": 3, "depth": 1},
        {"num_blocks": 12, "cache": {"enable_prefix_caching": False}},
        {"num_blocks": 12},
    ],
    ids=["plain", "few rows", "few blocks", "few blocks, cached"],
)
def test_answers_are_those_of_transformers(folder: Path, changes: dict[str, Any]) -> None:
    """Tries every rule of ending, in many searches at once."""
    engine = make_engine(folder, **changes)
    cases = list(itertools.product(range(len(PROMPTS)), BEAMS, (1, 3)))
    has_ended = 0
    for index, (prompt, beam, n) in enumerate(cases):
        engine.add(asked(f"{index}", PROMPTS[prompt], beam, n))
    engine.finish()
    for index, (prompt, beam, n) in enumerate(cases):
        wanted = expected(folder, prompt, beam, n)
        check(engine, f"{index}", wanted)
        has_ended += sum(len(tokens) < MAX_TOKENS for tokens in wanted)
    assert has_ended > len(cases) / 4
    assert engine.scheduler.check_empty() == []


def test_a_search_that_is_aborted_leaves_nothing(folder: Path) -> None:
    """Tries every step; the others go on."""
    wanted = expected(folder, 2, BEAMS[0], 3)
    engine = make_engine(folder, num_blocks=24)
    for num_steps in range(0, 2 * MAX_TOKENS, 2):
        engine.add(asked(f"a{num_steps}", PROMPTS[1], BEAMS[2], 2, ignore_eos=True))
        engine.add(asked(f"b{num_steps}", PROMPTS[2], BEAMS[0], 3))
        for _ in range(num_steps):
            engine.step()
        engine.abort(f"a{num_steps}" if num_steps % 4 else f"a{num_steps}.1")
        engine.finish()
        check(engine, f"b{num_steps}", wanted)
        assert engine.scheduler.check_empty() == []


def test_a_search_that_gives_up_all_rows_goes_on_at_once(folder: Path) -> None:
    """It is alone, and its beams outgrow the cache: nobody's result wakes the engine then."""
    prompt = [7 + i * 5 % 80 for i in range(52)]
    more = {"max_tokens": 26, "ignore_eos": True}
    few, many = (make_engine(folder, num_blocks=count, depth=1) for count in (11, 64))
    for engine in (few, many):
        engine.add(asked("a", prompt, BeamParams(4), **more))
        for _ in range(600):
            if engine.ended:
                break
            assert engine.step(), "the engine sleeps"
    assert few.scheduler.stats().num_preemptions > many.scheduler.stats().num_preemptions == 0
    assert few.tokens == many.tokens and few.ended == {"a": "length"}
    assert few.scheduler.check_empty() == []


def test_layers_with_states_and_windows_fork_too(tmp_path: Path) -> None:
    """A beam copies the states of the one that it continues."""
    for name in ("qwen3_next", "gpt_oss"):
        save_checkpoint(FAMILIES[name], tmp_path / name)
        engine = make_engine(tmp_path / name)
        for prompt, beam in ((1, BEAMS[0]), (2, BEAMS[1])):
            engine.add(asked(f"{prompt}", PROMPTS[prompt], beam, 2))
        engine.finish()
        for prompt, beam in ((1, BEAMS[0]), (2, BEAMS[1])):
            check(engine, f"{prompt}", expected(tmp_path / name, prompt, beam, 2))
        assert engine.scheduler.check_empty() == []
