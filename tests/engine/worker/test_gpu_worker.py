"""The worker on a CUDA device: the CPU's tokens, graphs equal to single launches, no waiting."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch
import zmq
from safetensors.torch import save_file

from engine.batch.buffer_utils import upload
from engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    FastPath,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from engine.distributed import TensorParallelGroup
from engine.executor.multiproc_executor import MultiprocExecutor
from engine.messages import EngineCoreRequest
from engine.models.registry import create_model
from engine.outputs import ModelRunnerOutput
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.sched.output import SchedulerOutput
from engine.sched.scheduler import Scheduler
from engine.worker.cudagraph_utils import default_capture_sizes
from engine.worker.worker import Worker

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(seed=5, temperature=0.9, top_p=0.95, ignore_eos=True)
FILTERED = SamplingParams(
    seed=8, temperature=1.2, top_k=12, min_p=0.02, ignore_eos=True, prompt_logprobs=3
)
PENALISED = SamplingParams(
    seed=6,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    min_tokens=8,
    logit_bias={3: 2.0},
    logprobs=3,
    ignore_eos=True,
)
KINDS = [GREEDY, SEEDED, FILTERED, PENALISED]
ROWS = 6
ALL_FAST_PATHS: tuple[FastPath, ...] = get_args(FastPath)

MODEL = ModelConfig(
    path="",
    served_model_name="small",
    architecture="LlamaForCausalLM",
    vocab_size=211,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling=None,
    tie_word_embeddings=False,
    attention_bias=False,
    qk_norm=False,
    max_model_len=96,
    eos_token_ids=(0,),
    dtype="float32",
    load_format="safetensors",
    model_hash="small",
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    model = create_model(_config(folder, "cpu"), TensorParallelGroup(0, 1), torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for weight in model.checkpoint_weights():
        noise = torch.randn(weight.shape, generator=generator)
        tensors[weight.name] = 1.0 + 0.1 * noise if len(weight.shape) == 1 else 0.1 * noise
    save_file(tensors, folder / "model.safetensors")
    return folder


def _config(folder: Path, device: str = "cuda", **changes: object) -> EngineConfig:
    dtype = changes.pop("dtype", "float32")
    depth = changes.pop("async_scheduling", False)
    num_blocks = changes.pop("num_blocks", 64)
    return EngineConfig(
        engine_id=f"gpu-{os.getpid()}",
        epoch=1,
        model=replace(MODEL, path=str(folder), dtype=dtype),
        cache=CacheConfig(block_size=8, num_blocks=num_blocks, enable_prefix_caching=False),
        scheduler=SchedulerConfig(
            max_num_seqs=ROWS, max_num_batched_tokens=160, async_scheduling=depth
        ),
        device=DeviceConfig(device=device, **changes),
    )


@contextmanager
def started(config: EngineConfig) -> Iterator[Worker]:
    worker = Worker(config, rank=0, rendezvous="")
    try:
        worker.init_device()
        worker.load_model(lambda fraction: None)
        worker.initialize_kv_cache(worker.determine_num_blocks())
        worker.capture_model(lambda stage, fraction: None)
        yield worker
    finally:
        worker.shutdown()


def conversation(driver, make_prompt) -> dict[str, list[int]]:
    """Prompts, chunks and decodes of all kinds of sampling; rows come and go."""
    lengths = {"a": 5, "b": 40, "c": 8, "d": 1}
    for row, (name, length) in enumerate(lengths.items()):
        driver.add(name, ROWS - 1 - row, make_prompt(length, length), KINDS[row], eos=(7,))
    driver.step({"a": 5, "b": 17})
    driver.step({"c": 3, "b": 1})
    driver.step({"c": 5, "b": 21})
    driver.step({"b": 1})
    driver.run(9)
    driver.remove("b")
    driver.add("e", 0, make_prompt(23, 9), SEEDED, eos=(7,))
    driver.step({"e": 23})
    driver.run(9)
    driver.remove("d")
    driver.remove("c")
    driver.run(9)
    return dict(driver.tokens)


def test_gives_the_tokens_of_the_cpu(weights: Path, make_driver, make_prompt) -> None:
    found = []
    for config in (_config(weights, "cpu"), _config(weights), _config(weights, enforce_eager=True)):
        with started(config) as worker:
            found.append(conversation(make_driver(worker.execute_model), make_prompt))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_replay_equals_single_launches_bit_for_bit(
    weights: Path, make_driver, make_prompt, dtype: str
) -> None:
    """With graphs of exactly the batch's size: cuBLAS chooses by size."""
    sizes = tuple(range(1, ROWS + 1))
    found = []
    for changes in ({"cudagraph_capture_sizes": sizes}, {"enforce_eager": True}):
        config = _config(weights, dtype=dtype, disabled_fast_paths=("prompt-graphs",), **changes)
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
    weights: Path, make_driver, make_prompt, disabled: tuple[FastPath, ...]
) -> None:
    found = []
    for left_out in (disabled, ALL_FAST_PATHS):
        with started(_config(weights, disabled_fast_paths=left_out)) as worker:
            found.append(conversation(make_driver(worker.execute_model), make_prompt))
    assert found[0] == found[1]


@pytest.mark.parametrize("chunks", [[40], [17, 1, 21, 1]])
def test_prompt_logprobs_are_those_of_the_same_output(
    weights: Path, make_driver, make_prompt, make_scores, chunks: list[int]
) -> None:
    with started(_config(weights)) as worker:
        driver = make_driver(worker.execute_model)
        generated, scored = make_scores(driver, make_prompt(30, 2), chunks)
        assert worker.compile_guard.late == []
    for output, prompt in zip(generated, scored, strict=True):
        assert (output.token_ids, output.rank) == (prompt.token_ids, prompt.rank)
        assert output.logprobs == pytest.approx(prompt.logprobs, abs=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fast_paths_repeat_themselves(weights: Path, make_driver, make_prompt, dtype: str) -> None:
    """In half precision, where products of few rows are ours."""
    with started(_config(weights, dtype=dtype)) as worker:
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
    weights: Path, make_driver, make_prompt, dtype: str, disabled: tuple[FastPath, ...]
) -> None:
    """A request alone, and cut into chunks beside others: the same tokens and log probabilities."""
    config = _config(weights, dtype=dtype, deterministic=True, disabled_fast_paths=disabled)
    with started(config) as worker:
        driver = make_driver(worker.execute_model)
        prompt, logged = make_prompt(37, 3), SamplingParams(temperature=0.7, seed=1, logprobs=5)
        driver.add("alone", 0, prompt, logged)
        driver.step({"alone": 37})
        expected = [driver.last.logprobs[0]]
        for _ in range(8):
            driver.step()
            expected.append(driver.last.logprobs[0])
        driver.remove("alone")
        for row, length in enumerate((40, 3, 20), 1):
            driver.add(str(row), row, make_prompt(length, row), KINDS[row])
        driver.add("together", 5, prompt, logged)
        driver.step({"1": 40, "together": 5})
        driver.step({"2": 3, "together": 31})
        driver.step({"3": 20, "together": 1})
        found = [driver.last.logprobs[5]]
        for _ in range(8):
            driver.step()
            found.append(driver.last.logprobs[5])
        assert found == expected


def test_a_graph_with_prompts_equals_single_launches_bit_for_bit(
    weights: Path, make_driver, make_prompt
) -> None:
    """Of a prompt that fills its graph: cuBLAS and the attention choose by size."""
    found = []
    for disabled in ((), ("prompt-graphs",)):
        config = _config(weights, dtype="bfloat16", disabled_fast_paths=disabled)
        with started(config) as worker:
            driver = make_driver(worker.execute_model)
            driver.add("a", 2, make_prompt(64, 1), GREEDY)
            driver.step({"a": 64})
            found.append((driver.tokens["a"], [layer.clone() for layer in worker.runner.kv_caches]))
    assert found[0][0] == found[1][0]
    for replayed, launched in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(replayed[1:], launched[1:])


@pytest.mark.multi_gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_two_ranks_give_the_tokens_of_one(
    weights: Path, make_driver, make_prompt, enforce_eager: bool
) -> None:
    found = []
    for tp_size in (1, 2):
        config = _config(weights, enforce_eager=enforce_eager)
        config = replace(config, parallel=ParallelConfig(tensor_parallel_size=tp_size))
        with running_ranks(config) as execute:
            found.append(conversation(make_driver(execute), make_prompt))
    assert found[0] == found[1]


@contextmanager
def running_ranks(
    config: EngineConfig,
) -> Iterator[Callable[[SchedulerOutput], ModelRunnerOutput]]:
    """Worker processes."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    executor = MultiprocExecutor(config, context)

    def execute(step: SchedulerOutput) -> ModelRunnerOutput:
        executor.execute_model(step)
        while not (outputs := executor.collect()):
            poller.poll(1000)
        return outputs[0]

    try:
        executor.initialize(lambda stage, fraction: None)
        poller = zmq.Poller()
        for source in executor.poll_sources:
            poller.register(source, zmq.POLLIN)
        yield execute
    finally:
        executor.shutdown()
        context.destroy()


def test_padding_changes_nothing(weights: Path, make_driver, make_prompt) -> None:
    found = []
    for sizes in (tuple(range(1, ROWS + 1)), (ROWS,)):
        with started(_config(weights, cudagraph_capture_sizes=sizes)) as worker:
            found.append(conversation(make_driver(worker.execute_model), make_prompt))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "changes",
    [{}, {"enforce_eager": True}, {"disabled_fast_paths": ALL_FAST_PATHS}],
)
def test_no_step_waits_for_the_device(
    weights: Path, make_driver, make_prompt, changes: dict[str, object]
) -> None:
    with started(_config(weights, **changes)) as worker:

        def execute(step: SchedulerOutput) -> ModelRunnerOutput:
            torch.cuda.set_sync_debug_mode("error")
            try:
                output = worker.start_step(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            return output.get_output()

        conversation(make_driver(execute), make_prompt)
        assert worker.compile_guard.late == []


class TwoDeep:
    """Scheduler and worker, up to `depth` steps on their way; results are read one step late."""

    def __init__(self, config: EngineConfig, worker: Worker, depth: int) -> None:
        self.scheduler = Scheduler(config, config.cache.num_blocks or 0, None)
        self._worker = worker
        self._depth = depth
        self._in_flight: deque = deque()
        self.tokens: dict[str, list[int]] = {}

    def run(self, requests: list[EngineCoreRequest]) -> None:
        for request in requests:
            self.tokens[request.request_id] = []
            self.scheduler.add_request(Request(request))
        while self.scheduler.has_unfinished_requests() or self._in_flight:
            while len(self._in_flight) < self._depth:
                step = self.scheduler.schedule()
                if step is None:
                    break
                self._in_flight.append((step, self._worker.start_step(step)))
            if self._in_flight:
                step, output = self._in_flight.popleft()
                for ended in self.scheduler.update_from_output(step, output.get_output()).outputs:
                    self.tokens[ended.request_id] += ended.new_token_ids


def test_two_steps_in_flight_give_the_same_tokens(weights: Path, make_prompt) -> None:
    """With too few blocks for all, so that requests are preempted and come back."""
    found, preemptions = [], []
    for depth in (1, 2):
        config = _config(weights, num_blocks=20, async_scheduling=depth == 2)
        with started(config) as worker:
            engine = TwoDeep(config, worker, depth)
            engine.run(
                [
                    EngineCoreRequest(
                        request_id=str(i),
                        prompt_token_ids=make_prompt(3 + 7 * i % 50, i),
                        sampling=msgspec.structs.replace(KINDS[i % 4], max_tokens=10 + 3 * i % 30),
                    )
                    for i in range(14)
                ]
            )
            found.append(engine.tokens)
            preemptions.append(engine.scheduler.stats().num_preemptions)
            assert engine.scheduler.check_empty() == []
    assert found[0] == found[1]
    assert min(preemptions) > 0


def test_a_running_copy_is_never_overwritten() -> None:
    """The device is kept busy while the host uploads again and again from temporary arrays."""
    targets = [torch.zeros(1 << 16, dtype=torch.int32, device="cuda") for _ in range(32)]
    torch.cuda._sleep(200_000_000)
    for value, target in enumerate(targets):
        upload(np.full(1 << 16, value, np.int32), target)
    for value, target in enumerate(targets):
        assert (target == value).all()


def test_the_cache_takes_its_share_of_the_memory(weights: Path) -> None:
    """With what the worker holds and needs besides, and not what others hold: they may share."""
    share = 0.1
    config = _config(weights, num_blocks=None)
    config = replace(
        config,
        model=replace(config.model, max_model_len=65536),
        cache=replace(config.cache, gpu_memory_utilization=share),
        scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048),
    )
    total = torch.cuda.get_device_properties(0).total_memory
    with started(config) as worker:
        held = torch.cuda.memory_reserved()
        worker.runner.dummy_run(2048)
        assert 0.6 * share * total < held
        assert torch.cuda.max_memory_reserved() < share * total


def test_capture_sizes_are_dense_and_reach_the_largest_batch() -> None:
    for largest in (1, 3, 8, 60, 256, 1000):
        sizes = default_capture_sizes(largest)
        assert sizes[-1] == largest
        assert list(sizes) == sorted(set(sizes))
        for num_reqs in range(1, largest + 1):
            padded = next(size for size in sizes if size >= num_reqs)
            assert padded - num_reqs <= max(7, num_reqs // 4)
