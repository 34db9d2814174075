"""Worker processes under an executor: steps, and what becomes of workers that do not answer."""

from __future__ import annotations

import itertools
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from engine.contracts.errors import EngineDeadError
from engine.contracts.outputs import ModelRunnerOutput
from engine.contracts.scheduler_output import SchedulerOutput
from engine.core.core import EngineCore
from engine.executor import process_executor
from engine.executor.abstract import KVCaches
from engine.executor.multiproc_executor import MultiprocExecutor
from engine.executor.worker_messages import WorkerFailed
from host.sockets.local_socket import connect_socket
from kv_transfer.config import KVTransferConfig
from tests.engine.core.tiny_engine import NUM_BLOCKS, tiny_config
from tests.processes import is_gone

TIMEOUT_S = 60


@contextmanager
def running_executor(
    tp_size: int = 1, step_timeout_s: float = 300.0
) -> Iterator[tuple[MultiprocExecutor, KVCaches]]:
    context = zmq.Context()
    executor = MultiprocExecutor(tiny_config(tp_size), context, step_timeout_s=step_timeout_s)
    try:
        yield executor, executor.initialize(lambda stage, fraction, total=0: None)
    finally:
        pids = executor.worker_pids
        executor.shutdown()
        executor.shutdown()
        context.destroy()
    assert pids
    assert all(is_gone(pid) for pid in pids)


def collect(executor: MultiprocExecutor, count: int) -> list[ModelRunnerOutput]:
    """Collects as the engine core does: sleeps on the sources until the deadline."""
    poller = zmq.Poller()
    for source in executor.poll_sources:
        poller.register(source, zmq.POLLIN)
    outputs: list[ModelRunnerOutput] = []
    end = time.monotonic() + TIMEOUT_S
    while len(outputs) < count:
        assert time.monotonic() < end, "no result"
        deadline = min(executor.deadline or end, end)
        poller.poll(max(0.0, deadline - time.monotonic()) * 1000 + 1)
        outputs += executor.collect()
    return outputs


def test_two_steps_in_flight_are_answered_in_order() -> None:
    with running_executor(tp_size=2) as (executor, caches):
        assert caches.num_blocks == NUM_BLOCKS
        assert [handle.rank for handle in caches.handles] == [0, 1]
        assert [handle.pid for handle in caches.handles] == executor.worker_pids
        assert executor.deadline is None
        executor.execute_model(SchedulerOutput(1))
        executor.execute_model(SchedulerOutput(2))
        assert executor.deadline is not None
        outputs = collect(executor, 2)
        assert [output.step_id for output in outputs] == [1, 2]
        assert executor.deadline is None
        assert executor.collect() == []


def test_worker_that_missed_a_step_ends_the_engine() -> None:
    with running_executor() as (executor, _):
        executor.execute_model(SchedulerOutput(1))
        executor.execute_model(SchedulerOutput(3))
        with pytest.raises(EngineDeadError, match="worker 0: MissedStepError: .* expected step 2"):
            collect(executor, 2)


def test_workers_that_fail_alike_are_named_together() -> None:
    context = zmq.Context()
    executor = MultiprocExecutor(tiny_config(3), context)
    executor._children = [SimpleNamespace(name=f"worker {rank}", exit_code=1) for rank in range(3)]
    executor._failed = {0: "no such file", 1: "no such device", 2: "no such file"}
    with pytest.raises(EngineDeadError) as dead:
        executor._die()
    assert str(dead.value) == "worker 0, worker 2: no such file; worker 1: no such device"
    executor._children = []
    executor.shutdown()
    context.destroy()


def test_last_words_are_heard_though_this_process_was_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are in the socket, and the clock is far ahead at every look."""
    context = zmq.Context()
    executor = MultiprocExecutor(tiny_config(), context)
    executor._children = [SimpleNamespace(name="worker 0", exit_code=1)]
    worker = connect_socket(context, zmq.PUSH, executor._reply_address)
    worker.send(msgspec.msgpack.encode(WorkerFailed(0, "no such file", [])))
    clock = SimpleNamespace(monotonic=itertools.count(0.0, 10.0).__next__)
    monkeypatch.setattr(process_executor, "time", clock)
    with pytest.raises(EngineDeadError, match="^worker 0: no such file$"):
        executor._die()
    executor._children = []
    executor.shutdown()
    worker.close()
    context.destroy()


def test_hanging_worker_is_named() -> None:
    with running_executor(step_timeout_s=0.5) as (executor, _):
        os.kill(executor.worker_pids[0], signal.SIGSTOP)
        executor.execute_model(SchedulerOutput(1))
        with pytest.raises(
            EngineDeadError,
            match=r"within 0\.5 s: worker 0 has not taken the step \(process state T\)",
        ):
            collect(executor, 1)


def test_a_worker_that_dies_before_transfers_start_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory goes with it, and the transfer process that maps it fails."""
    with running_executor() as (executor, caches):
        os.kill(executor.worker_pids[0], signal.SIGKILL)
        assert executor._children[0].wait(TIMEOUT_S)
        monkeypatch.setattr(executor, "initialize", lambda report: caches)
        config = replace(tiny_config(), kv_transfer=KVTransferConfig(kv_role="kv_producer"))
        with pytest.raises(EngineDeadError, match="^worker 0 was killed by SIGKILL"):
            EngineCore(config, executor, lambda stage, fraction, total=0: None)


def test_workers_can_be_stopped_while_they_start() -> None:
    context = zmq.Context()
    executor = MultiprocExecutor(tiny_config(), context)
    stages: list[str] = []

    def report(stage: str, fraction: float, total_bytes: int = 0) -> None:
        stages.append(stage)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        executor.initialize(report)
    sentinels = [s for s in executor.poll_sources if isinstance(s, int)]
    assert not select.select(sentinels, [], [], 0)[0], "the worker still runs"
    pids = executor.worker_pids
    executor.shutdown()
    context.destroy()
    assert stages == ["starting device"]
    assert all(is_gone(pid) for pid in pids)
