"""Whole engines whose ranks draw from their parts of the logits answer as those that gather all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from engine.config import DeviceConfig, EngineConfig, ParallelConfig, SpeculativeConfig
from engine.contracts.messages import EngineCoreRequest
from engine.core.core import EngineCore
from engine.layers.vocabulary.vocab_part import VocabPart
from engine.worker import model_runner
from tests.engine.kv_groups.grouped_node import GroupedNode, run_until
from tests.engine.thread_executor import ThreadExecutor
from tests.engine.tiny_model import tiny_model
from tests.engine.worker.drafts.test_draft_graphs import ThreadGraphsByHand
from tests.engine.worker.grammar_requests import (
    EOS,
    GPU_MODEL,
    VOCAB,
    grammar_config,
    grammar_workload,
    write_checkpoint,
)

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
FILTERS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "bad_words": (), "no_repeat_ngram_size": 0}
"""Turns off what steps gather logits for."""


def ask(node: GroupedNode, messages: list[EngineCoreRequest]) -> dict[str, list[int]]:
    """Returns all answers."""
    node.tokens |= {one.request_id: [] for one in messages}
    for one in messages:
        node.core.handle(one)
    run_until([node], lambda: node.ended.issuperset(one.request_id for one in messages))
    return node.tokens


@contextmanager
def running(config: EngineConfig) -> Iterator[GroupedNode]:
    """Runs ranks as threads, from graphs where a test records them by hand."""
    executor = ThreadExecutor(config)
    node = GroupedNode(config, EngineCore(config, executor, lambda *_: None), executor, None)
    try:
        if model_runner.CudaGraphManager is ThreadGraphsByHand:
            executor._on_all(lambda worker: worker.runner.capture_model(lambda fraction: None))
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


def workload(seed: int, logprobs: int | None) -> list[EngineCoreRequest]:
    """Returns requests under grammars, penalties, biases and the like, without what needs all
    logits; with `logprobs`, which needs them, all the same."""
    messages = grammar_workload(seed, count=8)
    for index, one in enumerate(messages):
        bias = {300: 2.0, 20: -50.0} if index % 3 == 1 else {}
        changed(one, logprobs=logprobs, logit_bias=bias, **FILTERS)
    return messages


def answers(
    config: EngineConfig, messages: list[EngineCoreRequest]
) -> tuple[dict[str, list[int]], int]:
    """Returns what has been answered, and how often ranks gathered logits."""
    with patch.object(VocabPart, "whole", autospec=True, side_effect=VocabPart.whole) as whole:
        with running(config) as node:
            found = ask(node, messages)
        return found, whole.call_count


def check_alike(folder: Path, seed: int, **fields: Any) -> dict[str, list[int]]:
    """Expects the same tokens of requests that make every step gather, and of the same ones without
    log probabilities, for which none does. Returns the tokens."""
    config = grammar_config(folder, model=MODEL, **fields)
    gathering, always = answers(config, workload(seed, logprobs=0))
    drawing, never = answers(config, workload(seed, logprobs=None))
    assert always > 0 and never == 0
    assert drawing == gathering
    assert any(drawing.values())
    return drawing


@pytest.mark.parametrize("tp_size", [2, 4])
def test_no_logits_are_gathered_for_grammars_penalties_and_biases(
    folder: Path, tp_size: int
) -> None:
    check_alike(folder, tp_size, parallel=ParallelConfig(tensor_parallel_size=tp_size))


def test_steps_that_need_all_logits_gather_beside_others(folder: Path) -> None:
    """Some requests have filters, some want log probabilities."""
    config = grammar_config(folder, model=MODEL, parallel=ParallelConfig(tensor_parallel_size=2))

    def mixed(every: int | None) -> list[EngineCoreRequest]:
        messages = workload(3, logprobs=every)
        changed(messages[1], top_p=0.8)
        changed(messages[4], logprobs=2, max_tokens=3)
        return messages

    gathering, always = answers(config, mixed(every=0))
    found, sometimes = answers(config, mixed(every=None))
    assert 0 < sometimes < always
    assert found == gathering


def test_drafts_are_checked_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched one by one; and by graphs, which end with a part of the logits then."""
    speculative = SpeculativeConfig(
        method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1
    )
    fields = {
        "parallel": ParallelConfig(tensor_parallel_size=2),
        "speculative": speculative,
        "decode_query_len": 4,
    }
    launched = check_alike(folder, 5, **fields)
    ThreadGraphsByHand.patch(monkeypatch)
    assert check_alike(folder, 5, **fields) == launched
    with running(grammar_config(folder, model=MODEL, **fields)) as node:
        ask(node, workload(5, logprobs=None))
        assert isinstance(node.executor, ThreadExecutor)
        for worker in node.executor.workers:
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
    check_alike(folder, 6, parallel=parallel)


@pytest.mark.multi_gpu
def test_gpus_draw_alike_from_parts_and_from_all_logits(tmp_path: Path) -> None:
    """Steps are recorded, and sampled behind their graphs."""
    write_checkpoint(tmp_path, GPU_MODEL)
    config = grammar_config(
        tmp_path,
        model=GPU_MODEL,
        device=DeviceConfig(device="cuda"),
        parallel=ParallelConfig(tensor_parallel_size=2),
    )
    found = []
    for logprobs in (0, None):
        node = GroupedNode.start(config)
        try:
            found.append(ask(node, workload(7, logprobs)))
        finally:
            node.shutdown()
    gathering, drawing = found
    assert drawing == gathering
