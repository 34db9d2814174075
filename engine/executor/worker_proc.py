"""The process of one rank.

    1. reads its configuration, attaches to the queue, connects its replies
    2. device, model, profiling run ──▶ WorkerLoaded
    3. InitializeKVCache ──▶ WorkerReady
       (on a GPU kernels are compiled and CUDA graphs recorded in between)
    4. ExecuteStep, again and again: each is started before the tokens of the one before are
       awaited, which another thread does; the first rank that samples answers each with StepDone
    5. StopWorker, or the end of the process that started us, and the kernel ends us with it

Whatever goes wrong is reported as WorkerFailed; then the process ends with exit code 1. A worker
never goes on after an error: its rows would not be those of the other ranks.

A thread of its own gives signs of life, from the start to the end: a long step is no silence, but a
process that is stopped, or an interpreter lock that nothing gives back, is one. The engine core
watches whether steps come to an end.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
from collections import deque

import msgspec
import zmq

from edge.logs.setup import setup_logging
from edge.program import settle
from engine.contracts.adapter_commands import DropAdapter, LoadAdapter
from engine.contracts.errors import CannotStartError
from engine.contracts.reports.crash_facts import chain_of
from engine.executor.queues.open_queue import open_queue
from engine.executor.ranks.adapter_loader import AdapterLoader
from engine.executor.ranks.result_thread import ResultThread
from engine.executor.ranks.step_profiler import StepProfiler
from engine.executor.worker_messages import (
    BeginProfile,
    EndProfile,
    ExecuteGroupStep,
    ExecuteStep,
    InitializeKVCache,
    StepDone,
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
from engine.worker.async_output import AsyncOutput
from engine.worker.worker import Worker
from host.child_process import read_config
from host.life_signs import LifeSign, LifeThread
from host.sockets.local_socket import Context, connect_socket
from host.sockets.secure_socket import connect_secure

logger = logging.getLogger(__name__)


class WorkerProc:
    """Runs a `Worker` on what the ring says."""

    def __init__(self, config: WorkerProcConfig) -> None:
        self._rank = config.rank
        self._answers = config.engine.parallel.answers(config.rank)
        self._parent_pid = os.getppid()
        self._context = Context()
        self._replies = _connect_replies(self._context, config)
        self._queue = open_queue(self._context, config.queue, config.reader, self._check_alive)
        self._commands = msgspec.msgpack.Decoder(WorkerCommand)
        self._replies_lock = threading.Lock()
        """The results' thread replies too."""
        self._worker = Worker(
            config.engine,
            config.rank,
            config.rendezvous,
            address=config.link.host_address if config.link is not None else "",
            gpu=config.gpu,
        )
        host = config.link.host_address if config.link is not None else socket.gethostname()
        self._profiler = StepProfiler(self._worker, host, self._reply)
        self._adapters = AdapterLoader(self._worker, self._reply)
        self._results = ResultThread(self._finish_step)
        self._taken_at: deque[float] = deque()
        """CLOCK_MONOTONIC seconds at which this process took each step whose result it has not
        sent."""
        self._done_at: float | None = None
        self._num_late = 0
        """Kernels compiled late that an answer has named."""
        self._life = self._give_signs(config)

    def run(self) -> None:
        """Returns when asked to stop."""
        try:
            self._start()
            while self._handle(self._next_command()):
                pass
        except Exception as error:
            is_explained = isinstance(error, CannotStartError)
            logger.error("%s", error, exc_info=not is_explained)
            reason = f"{type(error).__name__}: {error}"
            self._reply(WorkerFailed(self._rank, reason, chain_of(error)))
            raise SystemExit(1) from error
        finally:
            if self._life is not None:
                self._life.close()
            self._results.close()
            self._profiler.close()
            self._adapters.close()
            self._worker.shutdown()
            self._queue.close()
            self._context.destroy()

    def _give_signs(self, config: WorkerProcConfig) -> LifeThread | None:
        if config.life_sign is not None:
            return LifeThread(LifeSign.attach(config.life_sign).give)
        if config.link is not None:
            return LifeThread(lambda: self._reply(WorkerAlive(self._rank)))
        return None

    def _start(self) -> None:
        self._report("starting device", 0.0)
        self._worker.init_device()
        self._worker.load_model(self._report_loaded)
        self._report("measuring memory", 0.0)
        num_blocks = self._worker.determine_num_blocks()
        worker = self._worker
        self._reply(WorkerLoaded(self._rank, num_blocks, worker.device_name, worker.digests))

    def _handle(self, command: WorkerCommand) -> bool:
        """Handles one message and returns whether to go on."""
        match command:
            case ExecuteStep(step) | ExecuteGroupStep(step):
                self._taken_at.append(time.monotonic())
                self._results.put(self._profiler.run(step))
            case BeginProfile() | EndProfile():
                self._profiler.handle(command)
            case LoadAdapter() | DropAdapter():
                self._adapters.handle(command)
            case InitializeKVCache(num_blocks, model_hash):
                self._worker.identify(model_hash)
                handle = self._worker.initialize_kv_cache(num_blocks)
                self._worker.capture_model(self._report)
                settle()
                self._reply(WorkerReady(self._rank, handle, self._worker.prompt_steps))
            case SwitchWorker(engine):
                handle = self._worker.switch_role(engine)
                settle()
                self._reply(WorkerReady(self._rank, handle))
            case _:
                return False
        return True

    def _finish_step(self, output: AsyncOutput) -> None:
        """Sends a step's result; runs in the results' thread."""
        result = output.get_output()
        ahead_s = self._ahead_s(is_device=not output.is_ready)
        if self._answers:
            stats = self._worker.grammar_stats
            known = stats if stats.has_any else None
            worker = self._worker
            late = worker.compile_guard.late[self._num_late :]
            self._num_late += len(late)
            experts = worker.expert_stats
            self._reply(
                StepDone(result, worker.host_s, known, worker.group, experts, ahead_s, late)
            )

    def _ahead_s(self, *, is_device: bool) -> float | None:
        """Returns for how long the step that is done lay here before the one in front was."""
        taken_at, before = self._taken_at.popleft(), self._done_at
        self._done_at = time.monotonic()
        return before - taken_at if is_device and before is not None else None

    def _next_command(self) -> WorkerCommand:
        message = self._queue.dequeue()
        assert message is not None
        command: WorkerCommand = self._commands.decode(message)
        return command

    def _report(self, stage: str, fraction: float) -> None:
        self._reply(WorkerProgress(self._rank, stage, fraction))

    def _report_loaded(self, fraction: float) -> None:
        total = self._worker.load_log.total_bytes
        self._reply(WorkerProgress(self._rank, "loading weights", fraction, total))

    def _reply(self, reply: WorkerReply) -> None:
        message = msgspec.msgpack.encode(reply)
        with self._replies_lock:
            self._replies.send(message)

    def _check_alive(self) -> None:
        """Raises if there is nothing to wait for any more."""
        self._results.check()
        if os.getppid() != self._parent_pid:
            raise SystemExit("the process that started this worker has ended")


def _connect_replies(context: Context, config: WorkerProcConfig) -> zmq.Socket[bytes]:
    if config.link is None:
        return connect_socket(context, zmq.PUSH, config.reply_address)
    return connect_secure(context, zmq.PUSH, config.reply_address, config.link.key)


def main() -> None:
    config = read_config(WorkerProcConfig)
    setup_logging(config.log, f"worker {config.rank} of {config.engine.engine_id}", is_child=True)
    # What was imported stays: a full collection that looks at it holds a step up by 50 ms and more.
    gc.freeze()
    WorkerProc(config).run()


if __name__ == "__main__":
    main()
