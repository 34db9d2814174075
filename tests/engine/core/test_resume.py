"""A request that goes on where another node left off gives the very same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.contracts.messages import EngineCoreOutput, EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.core.core import EngineCore
from engine.executor.uniproc_executor import UniprocExecutor
from tests.engine.core.tiny_engine import tiny_config

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
COUNT = 20


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    executor = UniprocExecutor(tiny_config())
    core = EngineCore(tiny_config(), executor, lambda stage, fraction, total=0: None)
    yield core
    core.shutdown()
    executor.shutdown()


def run(core: EngineCore, sampling: SamplingParams, resumed: list[int]) -> list[EngineCoreOutput]:
    core.handle(
        EngineCoreRequest(
            request_id="r",
            spec=RequestSpec(PROMPT, sampling).resumed_after(resumed),
            eos_token_ids=(0,),
        )
    )
    found: list[EngineCoreOutput] = []
    core.step()
    while not core.is_idle:
        found += core.step().outputs
    core.check_empty()
    return found


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


@pytest.mark.parametrize(
    "wanted",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
        {"temperature": 0.7, "presence_penalty": 1.5, "frequency_penalty": 1.0},
        {"temperature": 0.0, "repetition_penalty": 1.8},
        {"temperature": 1.0, "min_tokens": 12, "logit_bias": {0: 8.0}},
        {"temperature": 1.0, "logprobs": 3},
        {
            "temperature": 1.0,
            "allowed_token_ids": tuple(range(1, 12)),
            "bad_words": ((3,), (5, 5), (5, 6), (7, 1), (1, 2, 4)),
        },
        {"temperature": 0.0, "allowed_token_ids": (4, 5, 6), "no_repeat_ngram_size": 3},
    ],
    ids=lambda wanted: "-".join(wanted),
)
def test_tokens_go_on_exactly(core: EngineCore, wanted: dict[str, Any]) -> None:
    sampling = SamplingParams(max_tokens=COUNT, seed=11, **wanted)
    whole = run(core, sampling, [])
    expected = tokens(whole)
    logprobs = [item for output in whole for item in output.logprobs or []]
    for cut in {1, len(expected) // 2, len(expected) - 1}:
        rest = run(core, sampling, expected[:cut])
        assert tokens(rest) == expected[cut:]
        assert rest[-1].finish_reason == whole[-1].finish_reason
        found = [item for output in rest for item in output.logprobs or []]
        for one, other in zip(found, logprobs[cut:], strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
