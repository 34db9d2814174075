"""Workers that are processes of their own, one for each rank.

    executor                                       worker processes
    1. queues, reply socket, processes  ─────────▶ device, model, profiling run
    2. min over ranks  ◀──────────── WorkerLoaded
    3. InitializeKVCache ─── queue ──────────────▶ allocate
    4. handles         ◀──────────── WorkerReady
    5. ExecuteStep ───────── queue ──────────────▶ all ranks compute
    6. collect         ◀──────────── StepDone      the first rank that samples, in each group

A worker that dies, reports an error or does not finish a step in time ends the engine: the other
ranks wait for it in a collective operation and cannot go on without it.

What differs is where the processes run and how messages reach them: see the subclasses.
"""

from __future__ import annotations

import socket
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import NoReturn, TypeVar, cast

import msgspec
import zmq

from engine.config import EngineConfig
from engine.contracts.adapter_commands import DropAdapter, LoadAdapter
from engine.contracts.errors import EngineDeadError
from engine.contracts.group_step import GroupStep, Step, StepResult
from engine.contracts.outputs import ExpertStats, GrammarStats
from engine.contracts.reports.crash_facts import ExceptionFacts
from engine.contracts.scheduler_output import EncodingOutput
from engine.executor.abstract import Executor, KVCaches, PollSource, ReportProgress
from engine.executor.group_results import GroupResults
from engine.executor.precompiling import start_precompiling
from engine.executor.ranks.rank_reports import RankReports
from engine.executor.worker_messages import (
    AdapterLoaded,
    BeginProfile,
    EndProfile,
    ExecuteGroupStep,
    ExecuteStep,
    InitializeKVCache,
    ProfileBegun,
    ProfileEnded,
    ProfileReply,
    StepDone,
    StopWorker,
    SwitchWorker,
    WorkerAlive,
    WorkerCommand,
    WorkerFailed,
    WorkerLoaded,
    WorkerProcConfig,
    WorkerProgress,
    WorkerReady,
    WorkerReply,
)
from engine.heartbeat_slots import worker_place
from engine.models.identity import IdentityJob
from host.child_process import HostedProcess, ipc_address, stop_all
from host.life_signs import LifeSignHandle, LifeSigns
from host.process_host import ProcessHost
from host.sockets.local_socket import Context, bind_socket
from host.sockets.message_reader import MessageReader
from kv_transfer.base import KVCacheHandle

_WORKER_MODULE = "engine.executor.worker_proc"
_STOP_TIMEOUT_S = 5.0
"""The seconds that a worker has to give everything back when it is asked to end."""
_TERMINATE_TIMEOUT_S = 1.0
"""The seconds that a worker has after SIGTERM, when it was not asked to end or does not."""
_LAST_WORDS_S = 0.3
"""The seconds in which others may still report why they failed, once one worker has."""
_LONGEST_LOOK_S = 0.05
"""Seconds of one poll of their messages. A longer one means that this process was stalled."""

ReplyT = TypeVar("ReplyT", WorkerLoaded, WorkerReady)


class ProcessExecutor(Executor):
    """Runs each worker in a process. `step_timeout_s`: a step that takes longer counts as hanging.
    `signs`: of all processes of the engine; None: unwatched.
    """

    _death_notice_s = _LAST_WORDS_S
    """The seconds that news of a worker's death may take when another's failure seems to follow
    from it.
    """

    def __init__(
        self,
        config: EngineConfig,
        context: Context,
        *,
        step_timeout_s: float = 300.0,
        signs: LifeSigns | None = None,
    ) -> None:
        self._config = config
        self._context = context
        self._step_timeout_s = step_timeout_s
        self._signs = signs
        self._num_ranks = config.parallel.num_ranks
        self._results = GroupResults(config.parallel.data_parallel_size)
        self._failed: dict[int, str] = {}
        """Rank to its final messages."""
        self._exceptions: dict[str, list[ExceptionFacts]] = {}
        self._children: list[HostedProcess] = []
        """The worker processes by rank."""
        self._helpers: Sequence[HostedProcess] = ()
        self._sent_at: deque[float] = deque()
        """The CLOCK_MONOTONIC seconds at which each step in flight was started, oldest first."""
        self._profile_replies: list[ProfileReply] = []
        self._adapter_replies: list[AdapterLoaded] = []
        self._progress: dict[str, dict[int, float]] = {}
        """Stage to fraction by rank."""
        self._encoder = msgspec.msgpack.Encoder()
        self._reply_address = self._address("replies")
        self._socket = bind_socket(context, zmq.PULL, self._reply_address)
        self._replies: MessageReader[WorkerReply] = MessageReader(
            self._socket, WorkerReply, "a worker"
        )
        self._is_running = False
        self._hosts: Sequence[ProcessHost] = ()
        self._num_blocks, self._device_name = 0, ""
        self._prompt_steps: Sequence[tuple[int, float]] = ()
        self._model_hash = ""
        self._reports = RankReports()

    # Where the workers are --------------------------------------------------------------------

    @abstractmethod
    def _find_hosts(self, report: ReportProgress) -> Sequence[ProcessHost]:
        """Returns the host on which each rank will run."""

    @property
    @abstractmethod
    def _core_address(self) -> str:
        """Returns the address of this host, where rank 0 runs, as the other ranks see it."""

    @abstractmethod
    def _worker_config(self, rank: int, rendezvous: str) -> WorkerProcConfig:
        """Returns what the worker is given at its start."""

    @abstractmethod
    def _enqueue(self, message: bytes) -> None:
        """Sends a message to all ranks."""

    @abstractmethod
    def _has_unread(self, rank: int) -> bool:
        """Returns whether this rank has messages that it has not taken yet."""

    @abstractmethod
    def _close(self) -> None:
        """Gives back what the subclass holds. Idempotent."""

    # Life -------------------------------------------------------------------------------------

    def _life_sign(self, rank: int) -> LifeSignHandle | None:
        return self._signs.handle(worker_place(rank)) if self._signs is not None else None

    def _address(self, purpose: str) -> str:
        return ipc_address(self._config.engine_id, f"{self._config.epoch:x}-{purpose}")

    def initialize(self, report: ReportProgress) -> KVCaches:
        hosts = self._find_hosts(report)
        identity = IdentityJob(self._config)
        family = socket.AF_INET6 if ":" in self._core_address else socket.AF_INET
        with socket.socket(family) as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind((self._core_address, 0))
            self._start_workers(hosts, reserved.getsockname()[1])
            loaded = self._wait_for_all(WorkerLoaded, report)
        self._hosts, self._device_name = hosts, loaded[0].device_name
        self._num_blocks = min(reply.num_blocks for reply in loaded)
        self._model_hash = identity.result(loaded[0].digests)
        self._send(InitializeKVCache(self._num_blocks, self._model_hash))
        ready = self._wait_for_all(WorkerReady, report)
        stop_all(self._helpers)
        self._prompt_steps = ready[0].prompt_steps
        self._is_running = True
        return self._caches([reply.handle for reply in ready])

    def switch_role(self, config: EngineConfig) -> KVCaches:
        self._send(SwitchWorker(config))
        ready = self._wait_for_all(WorkerReady, lambda *_: None)
        return self._caches([reply.handle for reply in ready])

    def _caches(self, handles: list[KVCacheHandle]) -> KVCaches:
        return KVCaches(
            self._num_blocks,
            handles,
            self._hosts,
            self._device_name,
            self._prompt_steps,
            self._model_hash,
        )

    def _start_workers(self, hosts: Sequence[ProcessHost], port: int) -> None:
        self._helpers = start_precompiling(self._config)
        env = {"OMP_NUM_THREADS": str(self._config.device.num_threads)}
        for rank, host in enumerate(hosts):
            where = f" on {host.link.host_address}" if host.link is not None else ""
            config = self._worker_config(rank, f"{self._core_address}:{port}")
            child = host.start(_WORKER_MODULE, config, f"worker {rank}{where}", env)
            self._children.append(child)

    def _wait_for_all(self, kind: type[ReplyT], report: ReportProgress) -> list[ReplyT]:
        """Waits for every rank and returns the replies by rank. Loading may take as long as it
        takes: only a death ends it.
        """
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
        """Reports a stage once all ranks are in it, and only as it goes on."""
        fractions = self._progress.setdefault(progress.stage, {})
        before = min(fractions.values(), default=0.0)
        is_news = progress.rank not in fractions
        fractions[progress.rank] = progress.fraction
        slowest = min(fractions.values())
        if len(fractions) == self._num_ranks and (is_news or slowest > before):
            report(progress.stage, slowest, progress.total_bytes)

    def execute_model(self, step: Step) -> None:
        if isinstance(step, GroupStep):
            self._send(ExecuteGroupStep(step))
        else:
            self._send(ExecuteStep(cast(EncodingOutput, step)))
        self._results.expect(step.step_id)
        self._sent_at.append(time.monotonic())

    def profile(self, command: BeginProfile | EndProfile) -> None:
        self._send(command)

    def take_profile_replies(self) -> list[ProfileReply]:
        replies, self._profile_replies = self._profile_replies, []
        return replies

    def adapter(self, command: LoadAdapter | DropAdapter) -> None:
        self._send(command)

    def take_adapter_replies(self) -> list[AdapterLoaded]:
        replies, self._adapter_replies = self._adapter_replies, []
        return replies

    def _send(self, command: WorkerCommand) -> None:
        self._enqueue(self._encoder.encode(command))

    def collect(self) -> Sequence[StepResult]:
        while self._receive() is not None:
            pass
        outputs = self._results.take()
        if not outputs:
            self._check_alive()
            self._check_progress()
        return outputs

    def _receive(self) -> WorkerReply | None:
        reply = self._replies.next()
        match reply:
            case StepDone(output) if self._sent_at:
                if self._results.add(reply.group, output):
                    self._sent_at.popleft()
                self._reports.take(reply)
            case ProfileBegun() | ProfileEnded():
                self._profile_replies.append(reply)
            case AdapterLoaded():
                self._adapter_replies.append(reply)
            case WorkerAlive(rank):
                if self._signs is not None:
                    self._signs.give(worker_place(rank))
            case WorkerFailed():
                self._note_failure(reply)
                self._die()
        return reply

    # Death ------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        """Raises EngineDeadError when a worker has ended."""
        if any(child.exit_code is not None for child in self._children):
            self._die()

    def _check_progress(self) -> None:
        deadline = self.deadline
        if deadline is None or time.monotonic() < deadline:
            return
        states = ", ".join(
            f"{child.name} {'has not taken' if self._has_unread(rank) else 'is in'} "
            f"the step (process state {child.state})"
            for rank, child in enumerate(self._children)
        )
        raise EngineDeadError(
            f"a step did not finish within {self._step_timeout_s:g} s: {states}; "
            f"the engine must be started again"
        )

    def _die(self) -> NoReturn:
        """Raises an error that names every worker that failed, killed ones first: an error
        elsewhere mostly follows from a rank that has gone.
        """
        waited_s = 0.0
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for child in self._children:
            if child.exit_code is None:
                poller.register(child.sentinel, zmq.POLLIN)
        while waited_s < self._patience_s and not self._all_have_spoken():
            looks_since = time.monotonic()
            for source, _ in poller.poll(int(_LONGEST_LOOK_S * 1000)):
                if source is not self._socket:
                    poller.unregister(source)
                    continue
                reply = self._replies.next()
                if isinstance(reply, WorkerFailed):
                    self._note_failure(reply)
            waited_s += min(time.monotonic() - looks_since, _LONGEST_LOOK_S)
        killed, failed = [], []
        alike: dict[str, list[str]] = {}
        for rank, child in enumerate(self._children):
            exit_code = child.exit_code
            if (exit_code or 0) < 0:
                killed.append(child.describe_exit())
            elif rank in self._failed:
                alike.setdefault(self._failed[rank], []).append(child.name)
            elif exit_code is not None:
                failed.append(child.describe_exit())
        said = [f"{', '.join(names)}: {reason}" for reason, names in alike.items()]
        raise EngineDeadError("; ".join(killed + said + failed), self._exceptions)

    def _note_failure(self, failure: WorkerFailed) -> None:
        self._failed[failure.rank] = failure.reason
        self._exceptions[f"worker {failure.rank}"] = failure.exceptions

    @property
    def _patience_s(self) -> float:
        cause_is_known = any((child.exit_code or 0) < 0 for child in self._children)
        return _LAST_WORDS_S if cause_is_known else self._death_notice_s

    def _all_have_spoken(self) -> bool:
        """Returns whether every failed worker has reported why; killed ones never do."""
        return all(
            rank in self._failed or (child.exit_code or 0) < 0
            for rank, child in enumerate(self._children)
        )

    # What the engine core looks at ------------------------------------------------------------

    @property
    def poll_sources(self) -> list[PollSource]:
        return [self._socket, *(child.sentinel for child in self._children)]

    @property
    def deadline(self) -> float | None:
        return self._sent_at[0] + self._step_timeout_s if self._sent_at else None

    @property
    def host_s(self) -> float:
        return self._reports.host_s

    @property
    def ahead_s(self) -> float | None:
        return self._reports.ahead_s

    @property
    def grammar_stats(self) -> GrammarStats:
        return self._reports.grammar_stats

    @property
    def expert_stats(self) -> ExpertStats | None:
        return self._reports.expert_stats

    @property
    def late_kernels(self) -> tuple[int, Sequence[str]]:
        return self._reports.late_kernels.all_reported

    @property
    def num_dropped_messages(self) -> int:
        return self._replies.num_dropped

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
        stop_all([*self._helpers, *self._children], _TERMINATE_TIMEOUT_S)
        self._close()
        self._socket.close(linger=0)

    def _wait_until_ended(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for child in self._children:
            child.wait(deadline - time.monotonic())
