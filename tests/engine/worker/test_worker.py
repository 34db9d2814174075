"""A worker from start to end, alone and as one of two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.contracts.outputs import ModelRunnerOutput
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import SchedulerOutput
from engine.kv_cache.capacity import KVCacheMemoryError
from engine.worker.worker import MissedStepError, Worker
from host.memory_file import MemoryFile
from kv_transfer.base import KVCacheHandle
from kv_transfer.config import KVTransferConfig
from tests.processes import free_address

SEEDED = SamplingParams(
    seed=5, temperature=0.8, top_k=20, frequency_penalty=0.2, logprobs=2, prompt_logprobs=1
)


@contextmanager
def running_worker(config: EngineConfig) -> Iterator[Worker]:
    worker = Worker(config, rank=0, rendezvous="")
    try:
        worker.init_device()
        worker.load_model(lambda fraction: None)
        yield worker
    finally:
        worker.shutdown()
        worker.shutdown()


def conversation(driver, make_prompt) -> list[list[int]]:  # type: ignore[no-untyped-def]
    """Runs chunked prompts, decodes, a preemption and a return; the tokens of all requests."""
    driver.add("a", 4, make_prompt(37, 1))
    driver.add("b", 0, make_prompt(8, 2), SEEDED, eos=(3,))
    driver.step({"a": 20, "b": 8})
    driver.step({"a": 16})
    driver.step({"a": 1})
    driver.run(4)
    driver.remove("b")
    driver.run(2)
    driver.add("c", 0, driver.tokens["b"], SEEDED, prompt_len=8, eos=(3,))
    driver.step({"c": len(driver.tokens["b"])})
    driver.run(5)
    return [driver.tokens["a"], driver.tokens["c"]]


def test_life_of_a_worker(make_config, make_driver, make_prompt) -> None:
    fractions: list[float] = []
    config = replace(make_config(), kv_transfer=KVTransferConfig(kv_role="kv_consumer"))
    worker = Worker(config, rank=0, rendezvous="")
    worker.init_device()
    assert torch.get_num_threads() == 1
    worker.load_model(fractions.append)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert worker.determine_num_blocks() == 64
    handle = worker.initialize_kv_cache(64)
    driver = make_driver(worker.execute_model)
    driver.add("a", 0, make_prompt(5, 1))
    driver.step({"a": 5})
    shared = MemoryFile.attach(handle.pid, handle.fd)
    layers = torch.frombuffer(bytearray(shared.buffer), dtype=torch.float32)
    block = layers.view(3, 64, 2, 2, 8, 8)[:, driver.blocks["a"][0]]
    assert bool(block[..., :5, :].all())
    assert not bool(block[..., 5:, :].any())
    shared.close()
    worker.shutdown()
    worker.shutdown()
    with pytest.raises(FileNotFoundError):
        MemoryFile.attach(handle.pid, handle.fd)


def test_a_worker_that_was_never_started_can_be_shut_down(make_config) -> None:
    Worker(make_config(), rank=0, rendezvous="").shutdown()


def test_a_missed_step_ends_the_worker(make_config) -> None:
    with running_worker(make_config()) as worker:
        worker.initialize_kv_cache(worker.determine_num_blocks())
        for step_id in (7, 8):
            assert worker.execute_model(SchedulerOutput(step_id=step_id)).step_id == step_id
        for wrong in (8, 10):
            with pytest.raises(MissedStepError, match=f"expected step 9 and got {wrong}"):
                worker.execute_model(SchedulerOutput(step_id=wrong))


def test_the_number_of_blocks_is_what_was_asked_for(make_config) -> None:
    with running_worker(make_config(num_blocks=12)) as worker:
        assert worker.determine_num_blocks() == 12
    block_bytes = 3 * 2 * 2 * 8 * 8 * 4
    by_bytes = make_config(num_blocks=None, kv_cache_memory_bytes=30 * block_bytes + 5)
    with running_worker(by_bytes) as worker:
        assert worker.determine_num_blocks() == 30


def test_unset_the_number_of_blocks_follows_from_memory(make_config, make_driver, make_prompt):
    """This model needs little, so all rows get all they can use; and the worker still works."""
    with running_worker(make_config(num_blocks=None)) as worker:
        assert worker.determine_num_blocks() == 6 * 12
        worker.initialize_kv_cache(72)
        driver = make_driver(worker.execute_model)
        profiled = conversation(driver, make_prompt)
    with running_worker(make_config()) as worker:
        worker.initialize_kv_cache(64)
        driver = make_driver(worker.execute_model)
        assert conversation(driver, make_prompt) == profiled


def test_too_small_a_cache_ends_the_start(make_config) -> None:
    with (
        running_worker(make_config(num_blocks=3)) as worker,
        pytest.raises(KVCacheMemoryError, match="room for 24 tokens .* max_model_len is 96"),
    ):
        worker.determine_num_blocks()


def test_two_ranks_give_the_tokens_of_one(make_config, make_driver, make_prompt) -> None:
    """Every rank samples the same token by itself. Ranks are threads here; the engine's tests have
    them as processes."""
    with running_worker(make_config()) as worker:
        worker.initialize_kv_cache(64)
        alone = conversation(make_driver(worker.execute_model), make_prompt)

    rendezvous, config = free_address(), make_config(tp_size=2)
    workers = [Worker(config, rank, rendezvous) for rank in range(2)]

    def start(worker: Worker) -> KVCacheHandle:
        worker.init_device()
        worker.load_model(lambda fraction: None)
        return worker.initialize_kv_cache(worker.determine_num_blocks())

    with ThreadPoolExecutor(2) as threads:

        def execute(step: SchedulerOutput) -> ModelRunnerOutput:
            first, second = threads.map(lambda worker: worker.execute_model(step), workers)
            assert first == second
            return first

        try:
            assert [handle.rank for handle in threads.map(start, workers)] == [0, 1]
            assert conversation(make_driver(execute), make_prompt) == alone
        finally:
            for worker in workers:
                worker.shutdown()
