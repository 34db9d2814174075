"""Tests that in a worker's loop nothing waits for the device but who reads a result, one
step late.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch.buffer_utils import upload
from engine.contracts.outputs import ModelRunnerOutput
from engine.contracts.scheduler_output import SchedulerOutput
from engine.worker.async_output import AsyncOutput
from engine.worker.worker import Worker
from kv_transfer.config import KVTransferConfig
from kv_transfer.metadata import KVConnectorMetadata, StepProgress
from kv_transfer.producer.layer_marks import LayerMarks
from tests.engine.worker.gpu_workers import (
    ALL_FAST_PATHS,
    GREEDY,
    MODEL,
    SchedulerAndWorker,
    conversation,
    mixed_requests,
    small_config,
    started,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

ways = pytest.mark.parametrize(
    "changes",
    [{}, {"enforce_eager": True}, {"disabled_fast_paths": ALL_FAST_PATHS}, {"deterministic": True}],
    ids=["graphs", "eager", "no fast path", "deterministic"],
)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def never_waiting(worker: Worker) -> Callable[[SchedulerOutput], AsyncOutput]:
    def start_step(step: SchedulerOutput) -> AsyncOutput:
        with waiting_is_an_error():
            return worker.start_step(step)

    return start_step


def test_the_check_itself_notices_a_wait() -> None:
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()


@ways
def test_no_step_waits(
    small_weights: Path, make_driver, make_prompt, changes: dict[str, object]
) -> None:
    with started(small_config(small_weights, **changes)) as worker:
        start_step = never_waiting(worker)
        conversation(make_driver(lambda step: start_step(step).get_output()), make_prompt)
        assert worker.compile_guard.late == []


@ways
def test_no_step_waits_with_two_in_flight(
    small_weights: Path, make_prompt, changes: dict[str, object]
) -> None:
    """The scheduler decides, requests are preempted and come back."""
    config = small_config(small_weights, num_blocks=20, async_scheduling=True, **changes)
    with started(config) as worker:
        engine = SchedulerAndWorker(config, never_waiting(worker), depth=2)
        engine.run(mixed_requests(make_prompt))
        assert engine.scheduler.stats().num_preemptions > 0
        assert engine.scheduler.check_empty() == []
        assert worker.compile_guard.late == []


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_no_step_waits_whose_kv_is_wanted_elsewhere(
    small_weights: Path, make_driver, make_prompt, enforce_eager: bool
) -> None:
    """The worker is a prefill node's: the stream marks each layer, and nobody watches for
    it here.
    """
    config = small_config(small_weights, enforce_eager=enforce_eager)
    config = replace(config, kv_transfer=KVTransferConfig(kv_role="kv_producer"))
    worker = Worker(config, rank=0, rendezvous="")
    try:
        worker.init_device()
        worker.load_model(lambda fraction: None)
        handle = worker.initialize_kv_cache(worker.determine_num_blocks())
        worker.capture_model(lambda stage, fraction: None)
        marks = LayerMarks.attach(os.getpid(), handle.marks_fd, MODEL.num_layers)
        start_step = never_waiting(worker)
        saved: list[int] = []

        def execute(step: SchedulerOutput) -> ModelRunnerOutput:
            step.kv = KVConnectorMetadata(save_kv=True)
            output = start_step(step).get_output()
            if step.prefill_chunks or output.rows:
                saved.append(step.step_id)
            return output

        conversation(make_driver(execute), make_prompt)
        torch.cuda.synchronize()
        assert marks.progress(saved[-1]) == StepProgress(saved[-1], MODEL.num_layers)
        marks.close()
    finally:
        worker.shutdown()


def test_a_running_copy_is_never_overwritten() -> None:
    """The device is kept busy while the host uploads again and again from temporary arrays."""
    targets = [torch.zeros(1 << 16, dtype=torch.int32, device="cuda") for _ in range(32)]
    torch.cuda._sleep(200_000_000)
    for value, target in enumerate(targets):
        upload(np.full(1 << 16, value, np.int32), target)
    for value, target in enumerate(targets):
        assert (target == value).all()


def test_a_result_without_tokens_comes_when_the_device_has_done_the_step(
    small_weights: Path, make_driver, make_prompt
) -> None:
    """Whoever hears of a chunk's KV may read it elsewhere, and write its blocks anew."""
    results: list[ModelRunnerOutput] = []
    with started(small_config(small_weights)) as worker:

        def execute(step: SchedulerOutput) -> ModelRunnerOutput:
            torch.cuda._sleep(50_000_000)
            results.append(worker.start_step(step).get_output())
            assert results[-1].rows or torch.cuda.current_stream().query()
            return results[-1]

        driver = make_driver(execute)
        driver.add("a", 0, make_prompt(40, 1), GREEDY)
        driver.step({"a": 17})
        driver.step({"a": 23})
    assert [len(result.rows) for result in results] == [0, 1]
