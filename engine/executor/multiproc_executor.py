"""Worker processes of one engine: one for each tensor-parallel rank.

    executor                                       worker processes
    1. ring, reply socket, children  ────────────▶ device, model, profiling run
    2. min over ranks  ◀──────────── WorkerLoaded
    3. InitializeKVCache ──── ring ──────────────▶ allocate
    4. handles         ◀──────────── WorkerReady
    5. ExecuteStep ────────── ring ──────────────▶ all ranks compute
    6. collect         ◀──────────── StepDone      rank 0

A worker that dies, reports an error or does not finish a step in time ends the engine: the other
ranks wait for it in a collective operation and cannot go on without it.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec
import zmq

from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.executor.abstract import Executor, KVCaches, PollSource, ReportProgress
from engine.executor.message_queue import MessageQueueWriter
from engine.executor.worker_messages import (
    ExecuteStep,
    InitializeKVCache,
    StepDone,
    StopWorker,
    WorkerFailed,
    WorkerLoaded,
    WorkerProcConfig,
    WorkerProgress,
    WorkerReady,
    WorkerReply,
)
from engine.outputs import ModelRunnerOutput
from engine.sched.output import SchedulerOutput
from kv_transfer.host.child_process import ChildProcess, ipc_address, stop_all
from kv_transfer.host.local_socket import Context, bind_socket

_WORKER_MODULE = "engine.executor.worker_proc"
_STOP_TIMEOUT_S = 5.0
"""For a worker that was asked to end, to give everything back."""
_TERMINATE_TIMEOUT_S = 1.0
"""For one that was not, or does not: SIGTERM simply ends it."""
_LAST_WORDS_S = 0.3
"""How long the others may still say why they failed, once one has."""

ReplyT = TypeVar("ReplyT", WorkerLoaded, WorkerReady)


class MultiprocExecutor(Executor):
    """`step_timeout_s`: a step that takes longer counts as hanging."""

    def __init__(
        self,
        config: EngineConfig,
        context: Context,
        *,
        step_timeout_s: float = 300.0,
    ) -> None:
        self._config = config
        self._step_timeout_s = step_timeout_s
        self._num_ranks = config.parallel.tensor_parallel_size
        self._failed: dict[int, str] = {}
        """Rank to its last words."""
        self._children: list[ChildProcess] = []
        """By rank."""
        self._sent_at: deque[float] = deque()
        """Of each step in flight, oldest first. CLOCK_MONOTONIC seconds."""
        self._outputs: deque[ModelRunnerOutput] = deque()
        self._progress: dict[str, dict[int, float]] = {}
        """Stage to fraction by rank."""
        self._encoder = msgspec.msgpack.Encoder()
        self._replies = msgspec.msgpack.Decoder(WorkerReply)
        self._reply_address = self._address("replies")
        self._socket = bind_socket(context, zmq.PULL, self._reply_address)
        self._queue = MessageQueueWriter(
            context,
            f"tandem-{config.engine_id}-steps",
            [self._address(f"steps{rank}") for rank in range(self._num_ranks)],
            self._check_alive,
        )
        self._is_running = False

    def _address(self, purpose: str) -> str:
        return ipc_address(self._config.engine_id, f"{self._config.epoch:x}-{purpose}")

    def initialize(self, report: ReportProgress) -> KVCaches:
        with socket.socket() as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            self._start_workers(f"127.0.0.1:{reserved.getsockname()[1]}")
            loaded = self._wait_for_all(WorkerLoaded, report)
        num_blocks = min(reply.num_blocks for reply in loaded)
        self._send(InitializeKVCache(num_blocks))
        ready = self._wait_for_all(WorkerReady, report)
        self._is_running = True
        return KVCaches(num_blocks, [reply.handle for reply in ready])

    def _start_workers(self, rendezvous: str) -> None:
        threads = str(self._config.device.num_threads)
        for rank in range(self._num_ranks):
            config = WorkerProcConfig(
                engine=self._config,
                rank=rank,
                rendezvous=rendezvous,
                queue=self._queue.handle,
                reply_address=self._reply_address,
                log_level=logging.getLogger().getEffectiveLevel(),
            )
            child = ChildProcess.start(
                _WORKER_MODULE, config, f"worker {rank}", {"OMP_NUM_THREADS": threads}
            )
            self._children.append(child)

    def _wait_for_all(self, kind: type[ReplyT], report: ReportProgress) -> list[ReplyT]:
        """The replies by rank. Loading may take as long as it takes: only a death ends it."""
        replies: dict[int, ReplyT] = {}
        poller = zmq.Poller()
        for source in self.poll_sources:
            poller.register(source, zmq.POLLIN)
        while len(replies) < self._num_ranks:
            poller.poll()
            received = False
            while (reply := self._receive()) is not None:
                received = True
                if isinstance(reply, kind):
                    replies[reply.rank] = reply
                elif isinstance(reply, WorkerProgress):
                    self._report_slowest(reply, report)
            if not received:
                self._check_alive()
        return [replies[rank] for rank in range(self._num_ranks)]

    def _report_slowest(self, progress: WorkerProgress, report: ReportProgress) -> None:
        """A stage is reported once all ranks are in it, and only as it goes on."""
        fractions = self._progress.setdefault(progress.stage, {})
        before = min(fractions.values(), default=0.0)
        is_news = progress.rank not in fractions
        fractions[progress.rank] = progress.fraction
        slowest = min(fractions.values())
        if len(fractions) == self._num_ranks and (is_news or slowest > before):
            report(progress.stage, slowest)

    def execute_model(self, step: SchedulerOutput) -> None:
        self._send(ExecuteStep(step))
        self._sent_at.append(time.monotonic())

    def _send(self, command: InitializeKVCache | ExecuteStep | StopWorker) -> None:
        self._queue.enqueue(self._encoder.encode(command))

    def collect(self) -> list[ModelRunnerOutput]:
        while self._receive() is not None:
            pass
        outputs = list(self._outputs)
        self._outputs.clear()
        if not outputs:
            self._check_alive()
            self._check_progress()
        return outputs

    def _receive(self) -> WorkerReply | None:
        try:
            reply: WorkerReply = self._replies.decode(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        match reply:
            case StepDone(output):
                self._sent_at.popleft()
                self._outputs.append(output)
            case WorkerFailed(rank, reason):
                self._failed[rank] = reason
                self._die()
        return reply

    def _check_alive(self) -> None:
        """Raises EngineDeadError when a worker has ended."""
        if any(child.exit_code is not None for child in self._children):
            self._die()

    def _check_progress(self) -> None:
        deadline = self.deadline
        if deadline is None or time.monotonic() < deadline:
            return
        states = ", ".join(
            f"{child.name} {'has not taken' if self._queue.num_unread(rank) else 'is in'} "
            f"the step (process state {_process_state(child.pid)})"
            for rank, child in enumerate(self._children)
        )
        raise EngineDeadError(
            f"a step did not finish within {self._step_timeout_s:g} s: {states}; "
            f"the engine must be started again"
        )

    def _die(self) -> NoReturn:
        """Names every worker that failed, those that were killed first: an error elsewhere is
        mostly the echo of a rank that has gone."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while (left := deadline - time.monotonic()) > 0 and not self._all_have_spoken():
            if self._socket.poll(int(left * 1000)):
                reply = self._replies.decode(self._socket.recv())
                if isinstance(reply, WorkerFailed):
                    self._failed[reply.rank] = reply.reason
        killed, failed = [], []
        for rank, child in enumerate(self._children):
            if (child.exit_code or 0) < 0:
                killed.append(child.describe_exit())
            elif rank in self._failed:
                failed.append(f"{child.name}: {self._failed[rank]}")
            elif child.exit_code is not None:
                failed.append(child.describe_exit())
        raise EngineDeadError("; ".join(killed + failed))

    def _all_have_spoken(self) -> bool:
        return len(self._failed) == self._num_ranks

    @property
    def poll_sources(self) -> list[PollSource]:
        return [self._socket, *(child.sentinel for child in self._children)]

    @property
    def deadline(self) -> float | None:
        return self._sent_at[0] + self._step_timeout_s if self._sent_at else None

    @property
    def worker_pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def shutdown(self) -> None:
        """Asks the workers to end when they can listen, and ends those that do not."""
        if self._is_running and all(child.exit_code is None for child in self._children):
            self._is_running = False
            if not self._sent_at:
                self._send(StopWorker())
                self._wait_until_ended(_STOP_TIMEOUT_S)
        stop_all(self._children, _TERMINATE_TIMEOUT_S)
        self._queue.close()
        self._socket.close(linger=0)

    def _wait_until_ended(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for child in self._children:
            child.wait(deadline - time.monotonic())


def _process_state(pid: int) -> str:
    """The kernel's letter: R running, S sleeping, D in the kernel, T stopped, Z ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "unknown"
