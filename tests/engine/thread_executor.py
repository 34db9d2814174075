"""All ranks of an engine as threads of this process: stages, and data-parallel groups."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar, cast

import msgspec
import torch

from engine.config import EngineConfig
from engine.contracts.adapter_commands import DropAdapter, LoadAdapter
from engine.contracts.errors import EngineDeadError
from engine.contracts.group_step import GroupStep, Step, StepResult
from engine.contracts.outputs import GrammarStats, ModelRunnerOutput
from engine.contracts.scheduler_output import EncodingOutput
from engine.executor.abstract import Executor, KVCaches, PollSource, ReportProgress
from engine.executor.group_results import GroupResults
from engine.executor.ranks.adapter_loader import AdapterLoader
from engine.executor.worker_messages import (
    AdapterLoaded,
    BeginProfile,
    EndProfile,
    ExecuteGroupStep,
    ExecuteStep,
    ProfileReply,
)
from engine.worker.worker import Worker
from tests.engine.models.conftest import free_ports

T = TypeVar("T")
_TIMEOUT_S = 60.0


class RankThread:
    """Calls, one after the other, what it is given; keeps the first error."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.error: Exception | None = None
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def start(self, call: Callable[[], T]) -> queue.SimpleQueue[T | None]:
        """Returns where the result will come; None: it failed."""
        found: queue.SimpleQueue[T | None] = queue.SimpleQueue()

        def run() -> None:
            result = None
            try:
                result = call()
            finally:
                found.put(result)

        self._calls.put(run)
        return found

    def _run(self) -> None:
        with torch.inference_mode():
            while (call := self._calls.get()) is not None:
                try:
                    call()
                except Exception as error:
                    self.error = self.error or error

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(_TIMEOUT_S)
        assert not self._thread.is_alive(), "a rank hangs"


def _as_sent(step: Step) -> bytes:
    """Returns the message that other processes would get: nothing else of a step reaches ranks."""
    if isinstance(step, GroupStep):
        return msgspec.msgpack.encode(ExecuteGroupStep(step))
    return msgspec.msgpack.encode(ExecuteStep(cast(EncodingOutput, step)))


class ThreadExecutor(Executor):
    """Runs ranks side by side; `max_in_flight` counts steps that were on their way at once, `steps`
    are all that there were."""

    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel
        rendezvous = f"127.0.0.1:{free_ports(1)[0]}"
        self._ranks = [
            RankThread(Worker(config, rank, rendezvous)) for rank in range(parallel.num_ranks)
        ]
        self._parallel = parallel
        self._of_groups = GroupResults(parallel.data_parallel_size)
        self.steps: list[Step] = []
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._results: queue.SimpleQueue[tuple[int, ModelRunnerOutput]] = queue.SimpleQueue()
        self._adapters_loaded: queue.SimpleQueue[AdapterLoaded] = queue.SimpleQueue()
        self._loaders = [AdapterLoader(worker, self._take_reply) for worker in self.workers]
        self._num_in_flight = 0
        self.max_in_flight = 0

    @property
    def workers(self) -> list[Worker]:
        return [rank.worker for rank in self._ranks]

    def _on_all(self, call: Callable[[Worker], T]) -> list[T]:
        started = [rank.start(lambda worker=rank.worker: call(worker)) for rank in self._ranks]  # type: ignore[misc]
        found = [one.get(timeout=_TIMEOUT_S) for one in started]
        self._check()
        return found

    def _check(self) -> None:
        for rank in self._ranks:
            if rank.error is not None:
                raise EngineDeadError(f"{type(rank.error).__name__}: {rank.error}") from rank.error

    def initialize(self, report: ReportProgress) -> KVCaches:
        self._on_all(lambda worker: worker.init_device())
        self._on_all(lambda worker: worker.load_model(lambda fraction: None))
        num_blocks = min(self._on_all(lambda worker: worker.determine_num_blocks()))
        handles = self._on_all(lambda worker: worker.initialize_kv_cache(num_blocks))
        self._on_all(lambda worker: worker.capture_model(lambda stage, fraction: None))
        return KVCaches(num_blocks, handles)

    def execute_model(self, step: Step) -> None:
        self.steps.append(step)
        self._of_groups.expect(step.step_id)
        self._num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._num_in_flight)
        sent = _as_sent(step)
        for index, rank in enumerate(self._ranks):
            received = msgspec.msgpack.decode(sent, type=ExecuteStep | ExecuteGroupStep).step
            rank.start(partial(self._run, index, rank.worker, received))

    def _run(self, index: int, worker: Worker, step: Step) -> None:
        result = worker.execute_model(step)
        if self._parallel.answers(index):
            self._results.put((worker.group, result))
            os.eventfd_write(self._event_fd, 1)

    def collect(self) -> list[StepResult]:
        with suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)
        self._check()
        with suppress(queue.Empty):
            while True:
                self._of_groups.add(*self._results.get_nowait())
        found = self._of_groups.take()
        self._num_in_flight -= len(found)
        return found

    def profile(self, command: BeginProfile | EndProfile) -> None:
        raise NotImplementedError

    def adapter(self, command: LoadAdapter | DropAdapter) -> None:
        for rank, loader in zip(self._ranks, self._loaders, strict=True):
            rank.start(partial(loader.handle, command))

    def _take_reply(self, reply: object) -> None:
        assert isinstance(reply, AdapterLoaded)
        self._adapters_loaded.put(reply)
        os.eventfd_write(self._event_fd, 1)

    def take_adapter_replies(self) -> list[AdapterLoaded]:
        replies: list[AdapterLoaded] = []
        with suppress(queue.Empty):
            while True:
                replies.append(self._adapters_loaded.get_nowait())
        return replies

    def take_profile_replies(self) -> list[ProfileReply]:
        return []

    @property
    def poll_sources(self) -> list[PollSource]:
        return [self._event_fd]

    @property
    def deadline(self) -> float | None:
        return time.monotonic() + _TIMEOUT_S if self._num_in_flight else None

    @property
    def host_s(self) -> float:
        return self._ranks[-1].worker.host_s

    @property
    def grammar_stats(self) -> GrammarStats:
        return GrammarStats()

    @property
    def worker_pids(self) -> list[int]:
        return [os.getpid()]

    def shutdown(self) -> None:
        for loader in self._loaders:
            loader.close()
        for rank in self._ranks:
            rank.start(rank.worker.shutdown)
        for rank in self._ranks:
            rank.close()
        os.close(self._event_fd)
