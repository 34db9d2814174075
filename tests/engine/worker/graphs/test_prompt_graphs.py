"""Graphs of steps with prompts, on the CPU: what a graph holds is run by hand instead of replayed,
over inputs that were loaded before, as a replay would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engine.models.shapes import shape_config
from engine.batch.input_batch import InputBuffers
from engine.config import EngineConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.steps.step_launches import GraphKey, LaunchTime, StepLaunches, StepParts
from engine.fast_paths import FastPath
from engine.layers.attention.paged import PagedBackend
from engine.models import recorded_steps
from engine.models.recorded_steps import (
    launch_time,
    longest_prompt,
    prompt_keys,
    prompts_to_record,
)
from engine.worker import model_runner
from engine.worker.graphs.cuda_graphs import CudaGraphManager
from engine.worker.kv_connector import KVConnector
from engine.worker.model_runner import ModelRunner
from kv_transfer.metadata import KVConnectorMetadata
from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_pages import PagedKV
from tests.engine.worker.drafts.drafters import KnowingDrafter
from tests.engine.worker.grammar_requests import (
    JSON,
    grammar_config,
    make_request,
    write_checkpoint,
)
from tests.engine.worker.one_engine import OneEngine
from tests.engine.worker.saved_layers import SavedLayers

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(seed=5, temperature=0.9, top_p=0.95)
PENALISED = SamplingParams(seed=6, repetition_penalty=1.3)
OF_1_7B = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
"""Holds what a shape of that many parameters has other than the 8B's."""


class GraphsByHand(CudaGraphManager):
    """`replayed` lists the keys."""

    has_decodes = False

    def capture(self, run, report) -> None:
        self._run = run
        self.replayed: list[GraphKey] = []
        if not self.has_decodes:
            self.launches = replace(self.launches, decodes={})
        for key in self.launches.prompts:
            run(key)

    def replay(self, key: GraphKey) -> None:
        self.replayed.append(key)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InputBuffers, "_upload", lambda *arrays: None)
            self._run(key)


@pytest.fixture
def with_graphs(monkeypatch) -> Callable[[ModelRunner], GraphsByHand]:
    """Gives a runner its graphs."""
    monkeypatch.setattr(model_runner, "CudaGraphManager", GraphsByHand)

    def capture(runner: ModelRunner) -> GraphsByHand:
        runner.capture_model(lambda fraction: None)
        assert isinstance(runner._graphs, GraphsByHand)
        return runner._graphs

    return capture


def converse(driver, make_prompt) -> dict[str, list[int]]:
    """Prompts together, behind each other, in chunks, beside decodes."""
    lengths = {"a": 5, "b": 40, "c": 8, "d": 2}
    for row, (name, length) in enumerate(lengths.items()):
        driver.add(name, 5 - row, make_prompt(length, length), (GREEDY, SEEDED)[row % 2])
    driver.step({"a": 5, "c": 8})
    driver.step({"b": 17})
    driver.step({"b": 12})
    driver.step({"b": 11})
    driver.step({"d": 2})
    driver.add("e", 0, make_prompt(23, 9), SEEDED)
    driver.step({"e": 23})
    driver.run(3)
    driver.remove("e")
    driver.add("f", 0, make_prompt(30, 8), PENALISED)
    driver.step({"f": 30})
    driver.run(3)
    return dict(driver.tokens)


@pytest.mark.parametrize("disabled", [(), ("sampled-rows",)])
def test_give_the_tokens_of_single_launches(
    make_runner, make_driver, make_prompt, with_graphs, disabled: tuple[FastPath, ...]
) -> None:
    eager, runner = make_runner(), make_runner(disabled_fast_paths=disabled)
    graphs = with_graphs(runner)
    found = [
        converse(make_driver(lambda step, r=r: r.execute_model(step).get_output()), make_prompt)
        for r in (eager, runner)
    ]
    assert found[0] == found[1]
    # Not the decodes alone. Chunks that get no token end with logits; a penalty needs them.
    sizes = [(key.num_reqs, key.num_tokens, key.samples) for key in graphs.replayed]
    assert sizes == [
        (6, 16, True), (6, 32, False), (6, 16, False), (6, 16, True), (6, 16, True), (6, 32, True),
        (6, 64, False),
    ]  # fmt: skip


def test_decodes_that_the_host_does_not_know_are_attended_apart(
    make_runner, make_driver, make_prompt, with_graphs
) -> None:
    """As a kernel does that cuts the contexts of one-token requests: what the device finds of each
    replayed step must tell them from its chunks and its padding."""
    found: list[int] = []

    def kernel(
        q: torch.Tensor, kv_cache: PagedKV, metadata: AttentionMetadata, scale: float
    ) -> torch.Tensor:
        if (hidden := metadata.hidden) is None:
            return ops.paged_attention(q, kv_cache, metadata, scale)
        count = len(hidden.seq_lens)
        decodes = replace(
            metadata,
            seq_lens=hidden.seq_lens,
            query_start_loc=torch.arange(count + 1, dtype=torch.int32),
            num_decodes=count,
        )
        others = replace(metadata, query_start_loc=hidden.query_start_loc)
        out = ops.paged_attention(q, kv_cache, others, scale)
        out[:count] += ops.paged_attention(q[:count], kv_cache, decodes, scale)
        found.append(int((hidden.seq_lens > 0).sum()))
        return out

    eager, runner = make_runner(), make_runner()
    assert isinstance(runner._attention, PagedBackend)
    runner._attention = replace(runner._attention, kernel=kernel)
    graphs = with_graphs(runner)
    assert all(key.any_context for key in graphs.launches.prompts)
    answers = [
        converse(make_driver(lambda step, r=r: r.execute_model(step).get_output()), make_prompt)
        for r in (eager, runner)
    ]
    assert answers[0] == answers[1]
    assert {0, 2, 4} <= set(found)


def test_prompts_under_grammars_have_graphs_that_end_with_logits(
    tmp_path: Path, with_graphs
) -> None:
    write_checkpoint(tmp_path)
    found = []
    for has_graphs in (False, True):
        engine = OneEngine(grammar_config(tmp_path), depth=1)
        graphs = with_graphs(engine.worker.runner) if has_graphs else None
        engine.add(make_request("a", JSON, [9, 8, 7, 6], seed=2))
        engine.add(make_request("b", "", [5, 6], seed=2))
        engine.finish()
        found.append(engine.tokens)
        engine.worker.shutdown()
    assert found[0] == found[1]
    assert graphs is not None and [key.samples for key in graphs.replayed] == [False]


def test_decodes_with_drafts_have_places_for_them_beside_prompts(
    make_config, make_prompt, with_graphs, monkeypatch
) -> None:
    """All that is right is accepted, of any request but those with chunks of prompts."""
    monkeypatch.setattr(recorded_steps, "DRAFTED_PROMPT_TOKENS", (32, 64))

    def come_one_by_one(query_len: int, answers: list[list[int]]) -> tuple[OneEngine, GraphsByHand]:
        engine = OneEngine(replace(make_config(), decode_query_len=query_len), depth=1)
        graphs = with_graphs(engine.worker.runner)
        engine.worker.runner.drafts.drafter = KnowingDrafter(answers)
        for index, prompt in enumerate(prompts):
            sampling = SamplingParams(seed=index, temperature=0.5 * (index % 2), max_tokens=20)
            engine.add(EngineCoreRequest(request_id=str(index), spec=RequestSpec(prompt, sampling)))
            engine.step()
            engine.step()
        engine.finish()
        engine.worker.shutdown()
        return engine, graphs

    prompts = [make_prompt(5 + index, index) for index in range(4)]
    one, graphs = come_one_by_one(1, [])
    assert len(graphs.replayed) == 4
    answers = [prompt + one.tokens[str(index)] for index, prompt in enumerate(prompts)]
    several, graphs = come_one_by_one(4, answers)
    assert several.tokens == one.tokens
    assert several.counts[4] > 0
    assert [key.draft_width for key in graphs.replayed] == [0, 4, 4, 4]


def test_layers_are_handed_on_behind_the_graph(
    make_runner, make_driver, make_prompt, with_graphs
) -> None:
    listener = SavedLayers()
    runner = make_runner(KVConnector(listener))
    graphs = with_graphs(runner)
    driver = make_driver(lambda step: runner.execute_model(step).get_output())
    driver.add("a", 0, make_prompt(9, 1))
    driver.step({"a": 9}, kv=KVConnectorMetadata(save_kv=True))
    assert len(graphs.replayed) == 1
    assert listener.saved == [(1, 0), (1, 1), (1, 2)]


def test_keys_are_smallest_first_and_fit() -> None:
    keys = prompt_keys(256, 600)
    assert keys[:4] == [
        GraphKey(8, size, samples) for size in (16, 32) for samples in (True, False)
    ]
    assert keys[-5:-2] == [
        GraphKey(8, 512, True), GraphKey(64, 512, True), GraphKey(64, 512, False)
    ]  # fmt: skip
    assert keys[-2:] == [GraphKey(256, 512, True), GraphKey(256, 512, False)]
    assert len(keys) == 3 * 2 + 6 * 3 + 2 * 2
    assert [(key.num_reqs, key.num_tokens) for key in prompt_keys(4, 40)] == 2 * [(4, 16)] + 2 * [
        (4, 32)
    ]


@pytest.mark.parametrize(
    ("shape", "quantization", "changes", "tokens"),
    [
        ("llama-3.1-8b", "", {}, 1024),
        ("llama-3.1-8b", "fp8", {}, 2048),
        ("llama-3.1-8b", "", {"tensor_parallel_size": 2}, 2048),
        ("llama-3.1-8b", "", OF_1_7B, 3072),
        ("qwen3-30b-a3b", "", {}, 4096),
        ("qwen3-30b-a3b", "", {"tensor_parallel_size": 2}, 6144),
        ("qwen3-30b-a3b", "fp8", {}, 6144),
        ("gpt-oss-20b", "", {}, 4096),
        ("qwen3.5-35b-a3b", "", {}, 4096),
        ("nemotron-3-nano", "", {}, 2048),
    ],
)
def test_steps_that_wait_for_the_host_are_recorded(
    shape: str, quantization: str, changes: dict[str, Any], tokens: int
) -> None:
    """Steps of small models, of models of many launches, of quantised ones, and of ranks that share
    layers: each has all of the launches and less to compute. In ms on an H200, one by one and from
    a graph: 1024 tokens of 28 layers of 1.7B parameters 29 and 5.7, 2000 of Qwen3.5-35B-A3B 79 and
    41, 3072 of Nemotron 3 Nano 49.8 and 50.6."""
    config = shape_config(shape, device="cpu", quantization=quantization, **changes)
    assert longest_prompt(config, launch_time(config)) == tokens


@pytest.mark.parametrize(
    ("shape", "changes", "expected"),
    [
        ("llama-3.1-8b", {}, LaunchTime(802, 0.0224, 3.76e-5)),
        ("llama-3.1-70b", {"tensor_parallel_size": 4}, LaunchTime(818, 0.056, 1.91e-5)),
        ("qwen3-30b-a3b", {}, LaunchTime(4571, 0.0624, 1.44e-4)),
        ("qwen3-30b-a3b", {"quantization": "fp8"}, LaunchTime(7313, 0.0624, 1.44e-4)),
        ("qwen3.5-35b-a3b", {}, LaunchTime(4535, 0.0565, 3.29e-5)),
    ],
)
def test_launching_one_by_one_takes_as_long_as_some_tokens(
    shape: str, changes: dict[str, Any], expected: LaunchTime
) -> None:
    """Experts and states have many launches and few FLOPs; large dense models have both."""
    found = launch_time(shape_config(shape, device="cpu", **changes))
    assert found == pytest.approx(expected, rel=0.01)


def test_sizes_of_recorded_prompts(make_config) -> None:
    config = make_config()
    limits = replace(config.scheduler, max_num_batched_tokens=8192, max_num_seqs=100)
    config = replace(config, scheduler=limits)

    def sizes_up_to(longest: int, config: EngineConfig = config) -> list[int]:
        keys = prompts_to_record(config, longest)
        largest = min(keys[-1].num_tokens, config.scheduler.max_num_batched_tokens)
        assert keys == prompt_keys(100, largest, any_context=True)
        assert keys == sorted(keys, key=lambda key: key.num_tokens)
        assert all(key.num_reqs >= 64 for key in keys if key.num_tokens > 512)
        assert [key.num_tokens for key in keys if key.num_reqs == 100 and key.samples] == [
            size for size in (320, 512, 1024) if size <= largest
        ]
        return sorted({key.num_tokens for key in keys})

    short, long, most = sizes_up_to(1024), sizes_up_to(2048), sizes_up_to(6144)
    assert (short[-1], long[-1], most[-4:]) == (1024, 2048, [4608, 5120, 5632, 6144])
    assert most[: len(long)] == long and long[: len(short)] == short
    fewer = replace(config, scheduler=replace(limits, max_num_batched_tokens=1600))
    assert sizes_up_to(2048, fewer) == [size for size in long if size <= 1600]
    for length in range(129, 4097):
        padded = next(size for size in most if size >= length)
        widest = 64 if length <= 384 else 128 if length <= 1024 else 256 if length <= 2048 else 512
        assert padded - length < widest
    for device in (
        replace(config.device, enforce_eager=True),
        replace(config.device, disabled_fast_paths=frozenset({"prompt-graphs"})),
    ):
        assert prompts_to_record(replace(config, device=device), 4096) == []


def test_the_smallest_that_holds_a_step_is_taken() -> None:
    launches = StepLaunches(prompts=tuple(prompt_keys(256, 512)))

    def found(num_prompts: int, tokens: int, samples: bool) -> GraphKey | str:
        return launches.find(StepParts(0, num_prompts, tokens, samples=samples))

    assert found(1, 100, True) == GraphKey(8, 128, True)
    assert found(9, 100, True) == GraphKey(64, 128, True)
    assert found(9, 20, True) == GraphKey(64, 128, True)
    assert found(65, 100, True) == GraphKey(256, 320, True)
    assert found(257, 300, True) == "257 requests with prompts, recorded up to 256"
    assert found(1, 513, True) == "513 tokens with prompts, recorded up to 512"
    assert found(1, 100, False) == GraphKey(64, 128, False)
    assert found(1, 20, False) == GraphKey(8, 32, False)
