"""Records the steps of one rank with torch.profiler, when an operator asks for it.

    handle(BeginProfile) ──▶ ProfileBegun     steps carry their number, rows and tokens
                             run, num_steps times, or handle(EndProfile)
                                │
                                └──▶ the file is written beside the steps ──▶ ProfileEnded

While no profile runs, `run` is the worker's own `start_step`: a step costs nothing more.

The file is what Chrome's tracing page and Perfetto read, compressed. It has names of operators,
kernels and annotations; no tensor's content, so nothing of any request.
"""

from __future__ import annotations

import gzip
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from engine.contracts.group_step import GroupStep, Step
from engine.contracts.reports.profiles import RankTrace
from engine.contracts.scheduler_output import SchedulerOutput
from engine.executor.worker_messages import (
    BeginProfile,
    EndProfile,
    ProfileBegun,
    ProfileEnded,
    ProfileReply,
)
from engine.worker.async_output import AsyncOutput
from engine.worker.worker import Worker

logger = logging.getLogger(__name__)


class StepProfiler:
    """Runs the steps of `worker`, whose host is known by the name `host`. `reply` is called in the
    thread that writes files, too. An error of the profiler ends the profile, never the worker."""

    run: Callable[[Step], AsyncOutput]
    """Starts a step."""

    def __init__(self, worker: Worker, host: str, reply: Callable[[ProfileReply], None]) -> None:
        self.run = worker.start_step
        self._worker = worker
        self._host = host
        self._reply = reply
        self._profile: profile | None = None
        self._path = Path()
        self._num_left = 0
        self._writing: threading.Thread | None = None

    def handle(self, command: BeginProfile | EndProfile) -> None:
        """Begins a profile, or ends the one that runs, if any does."""
        if isinstance(command, BeginProfile):
            self._begin(command)
        elif self._profile is not None:
            self._end(self._profile)

    def close(self) -> None:
        """Gives up a profile that runs and waits for a file that is being written. Idempotent."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
        if self._writing is not None:
            self._writing.join()

    def _begin(self, command: BeginProfile) -> None:
        worker = self._worker
        try:
            folder = Path(worker.config.inspection.torch_profiler_dir or "")
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / f"{command.name}-rank{worker.rank}.pt.trace.json.gz"
            self._path.with_suffix(".part").touch()
            activities = [ProfilerActivity.CPU]
            if worker.config.device.device == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(
                activities=activities,
                record_shapes=command.record_shapes,
                with_stack=command.with_stack,
            )
            self._profile.start()
        except Exception as error:
            self._profile = None
            logger.exception("a profile could not be started")
            self._reply(ProfileBegun(worker.rank, f"{type(error).__name__}: {error}"))
            return
        self._num_left = command.num_steps
        self.run = self._run_recorded
        self._reply(ProfileBegun(worker.rank))

    def _run_recorded(self, step: Step) -> AsyncOutput:
        assert self._profile is not None
        with record_function(self._annotation(step)):
            output = self._worker.start_step(step)
        self._num_left -= 1
        if self._num_left == 0:
            self._end(self._profile)
        return output

    def _annotation(self, step: Step) -> str:
        own = step
        if isinstance(step, GroupStep):
            of_group = step.steps[self._worker.group]
            if of_group is None:
                return f"step {step.step_id}: 0 rows, 0 tokens"
            own = of_group
        assert isinstance(own, SchedulerOutput)
        num_decodes, num_tokens = self._worker.runner.size_of(own)
        num_rows = num_decodes + len(own.prefill_chunks)
        return f"step {step.step_id}: {num_rows} rows, {num_tokens} tokens"

    def _end(self, running: profile) -> None:
        self._profile = None
        self.run = self._worker.start_step
        is_complete = self._num_left == 0
        try:
            if self._worker.config.device.device == "cuda":
                torch.cuda.synchronize()
            running.stop()
        except Exception as error:
            logger.exception("a profile could not be ended")
            self._ended(f"{type(error).__name__}: {error}", is_complete)
            return
        self._writing = threading.Thread(
            target=self._write, args=(running, is_complete), name="writes a profile"
        )
        self._writing.start()

    def _write(self, ended: profile, is_complete: bool) -> None:
        part = self._path.with_suffix(".part")
        plain = self._path.with_suffix("")
        try:
            ended.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(part, "wb", compresslevel=3) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            part.replace(self._path)
            error = ""
        except Exception as failure:
            logger.exception("a profile could not be written")
            error = f"{type(failure).__name__}: {failure}"
        for left in (part, plain):
            left.unlink(missing_ok=True)
        self._ended(error, is_complete)

    def _ended(self, error: str, is_complete: bool) -> None:
        path = "" if error else str(self._path.absolute())
        trace = RankTrace(self._worker.rank, self._host, path, error)
        self._reply(ProfileEnded(trace, is_complete))
