"""The worker on a CUDA device: the CPU's tokens, graphs equal to single launches, no waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zmq

from engine.config import EngineConfig, ParallelConfig
from engine.contracts.outputs import ModelRunnerOutput
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import SchedulerOutput
from engine.contracts.steps.step_launches import GraphKey
from engine.executor.multiproc_executor import MultiprocExecutor
from engine.fast_paths import FastPath
from engine.models.recorded_steps import default_capture_sizes
from engine.worker.graphs.cuda_graphs import CudaGraphManager
from tests.engine.worker.gpu_workers import (
    ALL_FAST_PATHS,
    GREEDY,
    KINDS,
    ROWS,
    SchedulerAndWorker,
    conversation,
    mixed_requests,
    small_config,
    started,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


def test_gives_the_tokens_of_the_cpu(small_weights: Path, make_driver, make_prompt) -> None:
    found = []
    for config in (
        small_config(small_weights, "cpu"),
        small_config(small_weights),
        small_config(small_weights, enforce_eager=True),
    ):
        with started(config) as worker:
            found.append(conversation(make_driver(worker.execute_model), make_prompt))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_replay_equals_single_launches_bit_for_bit(
    small_weights: Path, make_driver, make_prompt, dtype: str
) -> None:
    """Runs graphs of exactly the batch's size: cuBLAS chooses by size."""
    sizes = tuple(range(1, ROWS + 1))
    found = []
    for changes in ({"cudagraph_capture_sizes": sizes}, {"enforce_eager": True}):
        config = small_config(
            small_weights, dtype=dtype, disabled_fast_paths=("prompt-graphs",), **changes
        )
        with started(config) as worker:
            tokens = conversation(make_driver(worker.execute_model), make_prompt)
            caches = [layer.clone() for layer in worker.runner.kv_caches]
            found.append((tokens, caches))
    assert found[0][0] == found[1][0]
    # Block 0 belongs to nobody's steps, of which the two have different ones.
    for replayed, launched in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(replayed[1:], launched[1:])


@pytest.mark.parametrize("disabled", [(), *((path,) for path in ALL_FAST_PATHS)])
def test_fast_paths_give_the_tokens_of_none(
    small_weights: Path, make_driver, make_prompt, disabled: tuple[FastPath, ...]
) -> None:
    found = []
    for left_out in (disabled, ALL_FAST_PATHS):
        with started(small_config(small_weights, disabled_fast_paths=left_out)) as worker:
            found.append(conversation(make_driver(worker.execute_model), make_prompt))
    assert found[0] == found[1]


@pytest.mark.parametrize("chunks", [[40], [17, 1, 21, 1]])
def test_prompt_logprobs_are_those_of_the_same_output(
    small_weights: Path, make_driver, make_prompt, make_scores, chunks: list[int]
) -> None:
    with started(small_config(small_weights)) as worker:
        driver = make_driver(worker.execute_model)
        generated, scored = make_scores(driver, make_prompt(30, 2), chunks)
        assert worker.compile_guard.late == []
    for output, prompt in zip(generated, scored, strict=True):
        assert (output.token_ids, output.rank) == (prompt.token_ids, prompt.rank)
        assert output.logprobs == pytest.approx(prompt.logprobs, abs=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fast_paths_repeat_themselves(
    small_weights: Path, make_driver, make_prompt, dtype: str
) -> None:
    """Runs in half precision, where small-M GEMMs are ours."""
    with started(small_config(small_weights, dtype=dtype)) as worker:
        driver = make_driver(worker.execute_model)
        found = []
        for name in ("a", "b"):
            driver.add(name, 2, make_prompt(20, 1), GREEDY)
            driver.step({name: 20})
            driver.run(12)
            driver.remove(name)
            found.append(driver.tokens[name])
        assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("disabled", [(), ALL_FAST_PATHS])
def test_deterministic_mode(
    small_weights: Path, make_driver, make_prompt, dtype: str, disabled: tuple[FastPath, ...]
) -> None:
    """A request alone, and cut into chunks beside others: the same tokens and log probabilities."""
    config = small_config(
        small_weights, dtype=dtype, deterministic=True, disabled_fast_paths=disabled
    )
    with started(config) as worker:
        driver = make_driver(worker.execute_model)
        prompt, logged = make_prompt(37, 3), SamplingParams(temperature=0.7, seed=1, logprobs=5)
        driver.add("alone", 0, prompt, logged)
        driver.step({"alone": 37})
        expected = [driver.last.logprobs_by_row()[0][0]]
        for _ in range(8):
            driver.step()
            expected.append(driver.last.logprobs_by_row()[0][0])
        driver.remove("alone")
        for row, length in enumerate((40, 3, 20), 1):
            driver.add(str(row), row, make_prompt(length, row), KINDS[row])
        driver.add("together", 5, prompt, logged)
        driver.step({"1": 40, "together": 5})
        driver.step({"2": 3, "together": 31})
        driver.step({"3": 20, "together": 1})
        found = [driver.last.logprobs_by_row()[5][0]]
        for _ in range(8):
            driver.step()
            found.append(driver.last.logprobs_by_row()[5][0])
        assert found == expected


def test_a_graph_with_prompts_equals_single_launches_bit_for_bit(
    small_weights: Path, make_driver, make_prompt
) -> None:
    """The prompt fills its graph: cuBLAS and the attention choose by size."""
    found = []
    for disabled in ((), ("prompt-graphs",)):
        config = small_config(small_weights, dtype="bfloat16", disabled_fast_paths=disabled)
        with started(config) as worker:
            driver = make_driver(worker.execute_model)
            driver.add("a", 2, make_prompt(64, 1), GREEDY)
            driver.step({"a": 64})
            found.append((driver.tokens["a"], [layer.clone() for layer in worker.runner.kv_caches]))
    assert found[0][0] == found[1][0]
    for replayed, launched in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(replayed[1:], launched[1:])


def test_chunks_beside_answers_are_computed_by_graphs(
    small_weights: Path, make_driver, make_prompt, monkeypatch
) -> None:
    """Chunks get no token, decodes beside them do. As launched one by one."""
    replayed: list[GraphKey] = []
    replay = CudaGraphManager.replay
    monkeypatch.setattr(
        CudaGraphManager, "replay", lambda graphs, key: (replayed.append(key), replay(graphs, key))
    )
    found = []
    for disabled in ((), ("prompt-graphs",)):
        with started(small_config(small_weights, disabled_fast_paths=disabled)) as worker:
            driver = make_driver(worker.execute_model)
            driver.add("a", 2, make_prompt(30, 1), GREEDY)
            driver.step({"a": 30})
            driver.add("b", 0, make_prompt(60, 2), GREEDY)
            for chunk in (15, 20, 25):
                driver.step({"b": chunk})
            driver.run(4)
            found.append(dict(driver.tokens))
    assert found[0] == found[1]
    prompts = [(key.num_tokens, key.samples) for key in replayed if not key.decodes]
    assert prompts == [(32, True), (16, False), (32, False), (32, True)]


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("several", "enforce_eager"),
    [
        (ParallelConfig(tensor_parallel_size=2), False),
        (ParallelConfig(tensor_parallel_size=2), True),
        (ParallelConfig(tensor_parallel_size=4), False),
        (ParallelConfig(pipeline_parallel_size=2), False),
        (ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2), False),
    ],
)
def test_several_ranks_give_the_tokens_of_one(
    small_weights: Path, make_driver, make_prompt, several: ParallelConfig, enforce_eager: bool
) -> None:
    if torch.cuda.device_count() < several.num_ranks:
        pytest.skip(f"{several.num_ranks} GPUs are needed, each for a rank")
    found = []
    for parallel in (ParallelConfig(), several):
        config = small_config(small_weights, enforce_eager=enforce_eager)
        config = replace(config, parallel=parallel)
        with running_ranks(config) as execute:
            found.append(conversation(make_driver(execute), make_prompt))
    assert found[0] == found[1]


@contextmanager
def running_ranks(
    config: EngineConfig,
) -> Iterator[Callable[[SchedulerOutput], ModelRunnerOutput]]:
    """Runs worker processes."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    executor = MultiprocExecutor(config, context)

    def execute(step: SchedulerOutput) -> ModelRunnerOutput:
        executor.execute_model(step)
        while not (outputs := executor.collect()):
            poller.poll(1000)
        return outputs[0]

    try:
        executor.initialize(lambda stage, fraction, total=0: None)
        poller = zmq.Poller()
        for source in executor.poll_sources:
            poller.register(source, zmq.POLLIN)
        yield execute
    finally:
        executor.shutdown()
        context.destroy()


def test_padding_changes_nothing(small_weights: Path, make_driver, make_prompt) -> None:
    found = []
    for sizes in (tuple(range(1, ROWS + 1)), (ROWS,)):
        with started(small_config(small_weights, cudagraph_capture_sizes=sizes)) as worker:
            found.append(conversation(make_driver(worker.execute_model), make_prompt))
    assert found[0] == found[1]


def test_two_steps_in_flight_give_the_same_tokens(small_weights: Path, make_prompt) -> None:
    """There are too few blocks for all, so that requests are preempted and come back."""
    found, preemptions = [], []
    for depth in (1, 2):
        config = small_config(small_weights, num_blocks=20, async_scheduling=depth == 2)
        with started(config) as worker:
            engine = SchedulerAndWorker(config, worker.start_step, depth)
            engine.run(mixed_requests(make_prompt))
            found.append(engine.tokens)
            preemptions.append(engine.scheduler.stats().num_preemptions)
            assert engine.scheduler.check_empty() == []
    assert found[0] == found[1]
    assert min(preemptions) > 0


def test_capture_sizes_are_dense_and_reach_the_largest_batch() -> None:
    for largest in (1, 3, 8, 60, 256, 1000):
        sizes = default_capture_sizes(largest)
        assert sizes[-1] == largest
        assert list(sizes) == sorted(set(sizes))
        for num_reqs in range(1, largest + 1):
            padded = next(size for size in sizes if size >= num_reqs)
            assert padded - num_reqs <= max(7, num_reqs // 4)
