"""One rank in this process: for tests and for stepping through a model in a debugger."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Sequence

from engine.config import EngineConfig
from engine.contracts.adapter_commands import DropAdapter, LoadAdapter
from engine.contracts.group_step import Step
from engine.contracts.outputs import GrammarStats, ModelRunnerOutput
from engine.executor.abstract import Executor, KVCaches, PollSource, ReportProgress
from engine.executor.precompiling import start_precompiling
from engine.executor.ranks.adapter_loader import AdapterLoader
from engine.executor.ranks.rank_reports import KERNELS_NAMED
from engine.executor.ranks.step_profiler import StepProfiler
from engine.executor.worker_messages import AdapterLoaded, BeginProfile, EndProfile, ProfileReply
from engine.models.identity import IdentityJob
from engine.worker.async_output import AsyncOutput
from engine.worker.worker import Worker
from host.child_process import stop_all
from kv_transfer.base import KVCacheHandle


class UniprocExecutor(Executor):
    """Steps are started inside `execute_model`; on the CPU they end there, too."""

    def __init__(self, config: EngineConfig) -> None:
        if config.parallel.num_ranks != 1:
            raise ValueError("one process has one rank; use MultiprocExecutor")
        self._worker = Worker(config, rank=0, rendezvous="")
        self._profile_replies: list[ProfileReply] = []
        self._profiler = StepProfiler(self._worker, socket.gethostname(), self._on_profile)
        self._adapter_replies: list[AdapterLoaded] = []
        self._adapters = AdapterLoader(self._worker, self._on_adapter)
        self._outputs: deque[AsyncOutput] = deque()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def initialize(self, report: ReportProgress) -> KVCaches:
        helpers = start_precompiling(self._worker.config)
        identity = IdentityJob(self._worker.config)
        self._worker.init_device()
        self._worker.load_model(
            lambda fraction: report("loading weights", fraction, self._worker.load_log.total_bytes)
        )
        num_blocks = self._worker.determine_num_blocks()
        self._worker.identify(identity.result(self._worker.digests))
        handle = self._worker.initialize_kv_cache(num_blocks)
        self._worker.capture_model(report)
        stop_all(helpers)
        return self._caches(num_blocks, handle)

    def switch_role(self, config: EngineConfig) -> KVCaches:
        handle = self._worker.switch_role(config)
        return self._caches(handle.num_blocks, handle)

    def _caches(self, num_blocks: int, handle: KVCacheHandle) -> KVCaches:
        worker = self._worker
        model_hash = worker.config.model.model_hash
        return KVCaches(
            num_blocks, [handle], (), worker.device_name, worker.prompt_steps, model_hash
        )

    def execute_model(self, step: Step) -> None:
        self._outputs.append(self._profiler.run(step))
        os.eventfd_write(self._event_fd, 1)

    def profile(self, command: BeginProfile | EndProfile) -> None:
        self._profiler.handle(command)

    def _on_profile(self, reply: ProfileReply) -> None:
        """Keeps it; runs in the thread that writes the file, too."""
        self._profile_replies.append(reply)
        os.eventfd_write(self._event_fd, 1)

    def take_profile_replies(self) -> list[ProfileReply]:
        replies, self._profile_replies = self._profile_replies, []
        return replies

    def adapter(self, command: LoadAdapter | DropAdapter) -> None:
        self._adapters.handle(command)

    def _on_adapter(self, reply: AdapterLoaded) -> None:
        """Keeps it; runs in the thread that reads adapters."""
        self._adapter_replies.append(reply)
        os.eventfd_write(self._event_fd, 1)

    def take_adapter_replies(self) -> list[AdapterLoaded]:
        replies, self._adapter_replies = self._adapter_replies, []
        return replies

    def collect(self) -> list[ModelRunnerOutput]:
        """Waits for the oldest step only, so that the device has another one to go on with."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)
        if not self._outputs:
            return []
        results = [self._outputs.popleft().get_output()]
        while self._outputs and self._outputs[0].is_ready:
            results.append(self._outputs.popleft().get_output())
        if self._outputs:
            os.eventfd_write(self._event_fd, 1)
        return results

    @property
    def poll_sources(self) -> list[PollSource]:
        return [self._event_fd]

    @property
    def deadline(self) -> float | None:
        return None

    @property
    def host_s(self) -> float:
        return self._worker.host_s

    @property
    def grammar_stats(self) -> GrammarStats:
        return self._worker.grammar_stats

    @property
    def late_kernels(self) -> tuple[int, Sequence[str]]:
        late = self._worker.compile_guard.late
        return len(late), late[-KERNELS_NAMED:]

    @property
    def worker_pids(self) -> list[int]:
        return [os.getpid()]

    def shutdown(self) -> None:
        if self._event_fd >= 0:
            self._profiler.close()
            self._adapters.close()
            self._worker.shutdown()
            os.close(self._event_fd)
            self._event_fd = -1
