"""Whole engines whose ranks keep their parts of the logits answer as those that gather them do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from engine.config import (
    DeviceConfig,
    EngineConfig,
    ParallelConfig,
    SpeculativeConfig,
)
from engine.core.core import EngineCore
from engine.layers.vocab_part import VocabPart
from engine.messages import EngineCoreOutputs, EngineCoreRequest
from engine.outputs import TokenLogprobs
from engine.request_spec import RequestSpec
from engine.sampling_params import BeamParams, SamplingParams
from engine.worker import model_runner
from tests.engine.kv_groups.grouped_node import GroupedNode, run_until
from tests.engine.thread_executor import ThreadExecutor
from tests.engine.tiny_model import tiny_model
from tests.engine.worker.grammar_requests import (
    EOS,
    GPU_MODEL,
    VOCAB,
    grammar_config,
    grammar_workload,
    write_checkpoint,
)
from tests.engine.worker.test_draft_graphs import ThreadGraphsByHand

MODEL = tiny_model(
    vocab_size=VOCAB,
    num_heads=8,
    num_kv_heads=4,
    hidden_size=64,
    intermediate_size=128,
    max_model_len=96,
    load_format="safetensors",
    eos_token_ids=EOS,
)
_ROUNDING = 1e-4
FILTERS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "bad_words": ()}
"""Turns off what steps gather logits for."""


@dataclass
class Listener(GroupedNode):
    """Keeps log probabilities as well, of prompts by position."""

    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    of_prompts: dict[str, dict[int, TokenLogprobs]] = field(default_factory=dict)

    def step(self) -> EngineCoreOutputs:
        outputs = super().step()
        for output in outputs.outputs:
            self.logprobs.setdefault(output.request_id, []).extend(output.logprobs or ())
            if (part := output.prompt_logprobs) is not None:
                found = self.of_prompts.setdefault(output.request_id, {})
                found |= enumerate(part.unpack(), part.first_position)
        return outputs

    def record(self) -> None:
        """Records the graphs of all ranks."""
        assert isinstance(self.executor, ThreadExecutor)
        self.executor._on_all(lambda worker: worker.runner.capture_model(lambda fraction: None))

    def ask(self, messages: list[EngineCoreRequest]) -> None:
        """Waits for all answers."""
        names = [name for one in messages for name in one.choice_ids or (one.request_id,)]
        self.tokens |= {name: [] for name in names}
        for one in messages:
            self.core.handle(one)
        run_until([self], lambda: self.ended.issuperset(names))


@contextmanager
def running(config: EngineConfig) -> Iterator[Listener]:
    executor = ThreadExecutor(config)
    node = Listener(config, EngineCore(config, executor, lambda *_: None), executor, None)
    try:
        yield node
    finally:
        node.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sharded"), MODEL)


def changed(message: EngineCoreRequest, **changes: Any) -> EngineCoreRequest:
    """Returns the request with another sampling."""
    sampling = msgspec.structs.replace(message.spec.sampling, **changes)
    message.spec = msgspec.structs.replace(message.spec, sampling=sampling)
    return message


def workload(seed: int) -> list[EngineCoreRequest]:
    """All kinds of requests, most of them with log probabilities, some of their prompts, too."""
    messages = grammar_workload(seed, count=8)
    for index, one in enumerate(messages):
        more: dict[str, Any] = {"logprobs": (None, 0, 4, 9)[index % 4]}
        if index % 5 == 0:
            more["prompt_logprobs"] = 2
        if index % 6 == 1:
            more["logit_bias"] = {300: 2.0, 20: -50.0}
        changed(one, **more)
    return messages


def searches() -> list[EngineCoreRequest]:
    """Beam searches, and sampled requests beside them."""
    prompts = ([9, 8, 7], [300, 5, 17, 80, 41], [6])
    messages = [
        EngineCoreRequest(
            request_id=f"s{index}",
            spec=RequestSpec(
                prompt,
                SamplingParams(temperature=0.0, max_tokens=9, beam=BeamParams(width)),
                sibling_seeds=tuple(range(1, width)),
            ),
            eos_token_ids=EOS,
            choice_ids=tuple(f"s{index}.{i}" for i in range(width)),
        )
        for index, (prompt, width) in enumerate(zip(prompts, (4, 2, 5), strict=True))
    ]
    plain = RequestSpec([40, 41], SamplingParams(seed=4, max_tokens=9))
    return [*messages, EngineCoreRequest(request_id="plain", spec=plain, eos_token_ids=EOS)]


def answers(config: EngineConfig, messages: list[EngineCoreRequest]) -> tuple[Listener, int]:
    """Returns what has been answered, and how often ranks gathered logits."""
    with patch.object(VocabPart, "whole", autospec=True, side_effect=VocabPart.whole) as whole:
        with running(config) as node:
            if model_runner.CudaGraphManager is ThreadGraphsByHand:
                node.record()
            node.ask(messages)
        return node, whole.call_count


def check(got: TokenLogprobs, wanted: TokenLogprobs) -> None:
    """Stages and groups compute together what has come, and roundings differ with it: tokens may
    trade places that are as likely within them."""
    assert got.logprobs == pytest.approx(wanted.logprobs, abs=_ROUNDING)
    exact = list(wanted.logprobs[1:])
    nearest = min((a - b for a, b in itertools.pairwise(exact)), default=1.0)
    assert got.token_ids[0] == wanted.token_ids[0]
    if nearest > 2 * _ROUNDING:
        assert got.token_ids[:-1] == wanted.token_ids[:-1]
        assert got.rank == wanted.rank


def check_alike(folder: Path, make: Any, num_gathers: bool, **fields: Any) -> Listener:
    """Expects the same answers with and without the setting; with it, logits are gathered for some
    steps if `num_gathers`, else for none. Returns who has answered with it."""
    found = []
    for enabled in ((), ("sharded-sampling",)):
        device = DeviceConfig(enabled_fast_paths=enabled)
        config = grammar_config(folder, model=MODEL, device=device, **fields)
        found.append(answers(config, make()))
    (gathering, always), (sharded, seldom) = found
    assert always > 0 and (0 < seldom < always if num_gathers else seldom == 0)
    assert sharded.tokens == gathering.tokens
    assert any(sharded.tokens.values())
    assert sharded.logprobs.keys() == gathering.logprobs.keys()
    for name, logprobs in gathering.logprobs.items():
        for got, wanted in zip(sharded.logprobs[name], logprobs, strict=True):
            check(got, wanted)
    assert sharded.of_prompts.keys() == gathering.of_prompts.keys()
    for name, of_prompt in gathering.of_prompts.items():
        assert sharded.of_prompts[name].keys() == of_prompt.keys()
        for position, wanted in of_prompt.items():
            check(sharded.of_prompts[name][position], wanted)
    return sharded


@pytest.mark.parametrize("tp_size", [2, 4])
def test_no_logits_are_gathered_for_grammars_penalties_and_log_probabilities(
    folder: Path, tp_size: int
) -> None:
    def make() -> list[EngineCoreRequest]:
        return [changed(one, **FILTERS) for one in workload(tp_size)]

    parallel = ParallelConfig(tensor_parallel_size=tp_size)
    check_alike(folder, make, num_gathers=False, parallel=parallel)


def test_steps_with_filters_gather_beside_others(folder: Path) -> None:
    parallel = ParallelConfig(tensor_parallel_size=2)
    check_alike(folder, lambda: workload(3), num_gathers=True, parallel=parallel)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_beams(folder: Path, tp_size: int) -> None:
    """Nothing is gathered: a search asks for one answer's candidates."""
    parallel = ParallelConfig(tensor_parallel_size=tp_size)
    check_alike(folder, searches, num_gathers=False, parallel=parallel)


def test_drafts_are_checked_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched one by one; and by graphs, which end with a part of the logits then."""
    speculative = SpeculativeConfig(
        method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1
    )

    def make() -> list[EngineCoreRequest]:
        return [changed(one, **FILTERS) for one in workload(5)]

    fields = {
        "parallel": ParallelConfig(tensor_parallel_size=2),
        "speculative": speculative,
        "decode_query_len": 4,
    }
    launched = check_alike(folder, make, num_gathers=False, **fields)
    ThreadGraphsByHand.patch(monkeypatch)
    recorded = check_alike(folder, make, num_gathers=False, **fields)
    assert recorded.tokens == launched.tokens
    assert isinstance(recorded.executor, ThreadExecutor)
    for worker in recorded.executor.workers:
        graphs = worker.runner._graphs
        assert isinstance(graphs, ThreadGraphsByHand)
        assert any(key.decodes and not key.samples for key in graphs.replayed)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2),
        ParallelConfig(tensor_parallel_size=2, data_parallel_size=2),
    ],
    ids=["stages", "groups"],
)
def test_stages_and_groups(folder: Path, parallel: ParallelConfig) -> None:
    def make() -> list[EngineCoreRequest]:
        return [changed(one, **FILTERS) for one in workload(6)] + searches()

    check_alike(folder, make, num_gathers=False, parallel=parallel)


@pytest.mark.multi_gpu
def test_gpus_answer_alike_with_parts_and_with_all_logits(tmp_path: Path) -> None:
    """Steps are recorded, and sampled behind their graphs."""
    write_checkpoint(tmp_path, GPU_MODEL)
    found = []
    for enabled in ((), ("sharded-sampling",)):
        config = grammar_config(
            tmp_path,
            model=GPU_MODEL,
            device=DeviceConfig(device="cuda", enabled_fast_paths=enabled),
            parallel=ParallelConfig(tensor_parallel_size=2),
        )
        node = Listener.start(config)
        assert isinstance(node, Listener)
        try:
            node.ask([changed(one, **FILTERS) for one in workload(7)] + searches())
        finally:
            node.shutdown()
        found.append(node)
    gathering, sharded = found
    assert sharded.tokens == gathering.tokens
    for name, logprobs in gathering.logprobs.items():
        for got, wanted in zip(sharded.logprobs[name], logprobs, strict=True):
            check(got, wanted)
