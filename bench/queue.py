#!/usr/bin/env python3
"""Runs plans of measurements on the GPUs of a host, and keeps all that they give.

    python -m bench.queue --list goodput tiers                 # what is in two plans
    python -m bench.queue goodput four_bits --out /tmp/out     # run them on all GPUs
    python -m bench.queue goodput --out /tmp/out --gpus 0,1 --limit-s 590
    python -m bench.queue gpu_tests --out /tmp/out --gpus 0,0,0,0   # four at once on one GPU

A plan is a file of jobs (`bench/plan.py` says what is in one); bench/plans/ has one for each
question. Jobs begin in order, as soon as there are GPUs for them; one whose figures other work
would spoil has the host to itself. A GPU that is named several times runs this many jobs at once,
for tests; seconds that they measure mean nothing. Each job has a time limit, at which its whole
session is killed; one that fails stops only those that come after it. With `--limit-s` no job
begins that needs longer than is left, and what runs then is killed.

OUT has the output of each job as NAME.log, its results in the folder NAME, and queue.json: which
machine, versions and commit, and of each job the command, GPUs, seconds and exit code, written anew
with each change. Ends with 1 if a job failed. SIGTERM kills what runs.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import psutil

from bench.arguments import parser_of
from bench.plan import ROOT, Job, PlanError, read_plans
from bench.record import machine, origin
from host.child_process import ChildProcess, environment_with
from host.termination import bound

_MOST_THREADS = 16
_POLL_S = 0.02
_DEATH_S = 20.0
"""The time that killed processes have to disappear: a driver may hold them for seconds."""


class Stopped(Exception):
    """The queue was asked to end."""


class Entry(msgspec.Struct):
    """Tells what became of a job. `why` it failed or was left out; `gpus`: CUDA's numbers, each as
    often as it had a place there; `tests`: how many ran, failed and were skipped."""

    name: str
    decides: str
    command: str
    state: str = "waiting"
    why: str = ""
    gpus: list[str] = []
    seconds: float | None = None
    exit_code: int | None = None
    tests: dict[str, int] = {}
    results: list[str] = []


@dataclass(eq=False)
class Running:
    """A job that runs, in a session of its own. `before`: when files that it may write changed."""

    job: Job
    places: list[str]
    child: ChildProcess
    folder: Path
    began: float
    ends_at: float
    before: dict[Path, int] = field(default_factory=dict)

    def kill(self) -> None:
        """Ends all of the session, whatever group its processes are in, and waits for their end."""
        deadline = time.monotonic() + _DEATH_S
        while (pids := list(session_of(self.child.pid))) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
        if self.child.wait(0.0):
            self.child.reap(0.0)

    def tests(self) -> dict[str, int]:
        """Returns what pytest counted; empty where nothing did, or was killed while it wrote."""
        kinds = ("tests", "failures", "errors", "skipped")
        try:
            suites = list(ElementTree.parse(self.folder / "tests.xml").iter("testsuite"))
        except (FileNotFoundError, ElementTree.ParseError):
            return {}
        return {kind: sum(int(suite.get(kind, 0)) for suite in suites) for kind in kinds}

    def failure(self) -> str:
        """Returns what is wrong with a job that has ended by itself; empty: nothing."""
        if code := self.child.exit_code:
            name = self.child.describe_exit().removeprefix(f"{self.job.name} ")
            return name if code < 0 else f"exit code {code}"
        tests = self.tests()
        if self.job.pytest and tests.get("skipped", 0) >= tests.get("tests", 0):
            return "no test ran"
        missing = [one for one in self.job.results if not self.written(one)]
        return f"did not write {', '.join(missing)}" if missing else ""

    def written(self, pattern: str) -> list[Path]:
        """Returns the files of this pattern that were written since the job began."""
        return [path for path, at in changes(pattern).items() if at != self.before.get(path)]


class Queue:
    """Runs jobs until none can begin any more.

    Args:
        places: CUDA's numbers of the devices, each as often as jobs may share it; each `cpu` is a
            place for a job without one.
        limit_s: The time for all jobs together.
        clock: Returns seconds that only grow.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        places: Sequence[str],
        folder: Path,
        limit_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._waiting = list(jobs)
        self._places, self._free = list(places), list(places)
        self._folder = folder
        self._began = self._clock()
        self._over_at = self._began + limit_s
        self._running: list[Running] = []
        self._origin = origin()
        self.entries = {job.name: Entry(job.name, job.decides, job.command) for job in jobs}

    def run(self) -> None:
        """Returns when all jobs have ended or been left out; none outlives it. Raises `Stopped`."""
        try:
            while self._begin_jobs() or self._running:
                ends_at = min(one.ends_at for one in self._running)
                sentinels = [one.child.sentinel for one in self._running]
                wait(sentinels, max(0.0, ends_at - self._clock()))
                for one in list(self._running):
                    if one.child.exit_code is not None:
                        self._end(one, one.failure())
                    elif self._clock() >= one.ends_at:
                        is_own = one.ends_at < self._over_at
                        late = f"it took longer than {one.job.limit_s:g} s"
                        self._end(one, late if is_own else "the queue's time was over")
        except Stopped as why:
            for one in list(self._running):
                self._end(one, str(why))
            self._leave_out(str(why))
            raise
        finally:
            for one in self._running:
                one.kill()

    def _begin_jobs(self) -> bool:
        """Begins those that may, in order; returns whether one did."""
        begun = False
        self._leave_out()
        for job in list(self._waiting):
            if any(self.entries[name].state != "passed" for name in job.after):
                continue
            places = places_for(job, self._free, self._places)
            if not places:
                break
            self._waiting.remove(job)
            for place in places:
                self._free.remove(place)
            self._running.append(self._start(job, places))
            self._note(job, "running", gpus=places)
            begun = True
        return begun

    def _leave_out(self, stopped: str = "") -> None:
        """Leaves out what cannot begin any more. `stopped`: why nothing can."""
        left_s = self._over_at - self._clock()
        for job in list(self._waiting):
            bad = [name for name in job.after if self.entries[name].state in ("failed", "left out")]
            why = stopped or (f"needs {', '.join(bad)}" if bad else "")
            if not why and not places_for(job, self._places, self._places):
                why = f"needs {job.gpus} GPUs"
            if not why and job.takes_s > left_s:
                why = "no time is left for it"
            if why:
                self._waiting.remove(job)
                self._note(job, "left out", why)

    def _start(self, job: Job, places: list[str]) -> Running:
        own = self._folder / job.name
        own.mkdir(exist_ok=True)
        (own / "tests.xml").unlink(missing_ok=True)
        threads = len(os.sched_getaffinity(0)) // len(self._places)
        more = {
            "CUDA_VISIBLE_DEVICES": ",".join(gpu for gpu in places[: job.gpus] if gpu != "cpu"),
            "OMP_NUM_THREADS": str(max(1, min(_MOST_THREADS, threads))),
            "PYTHONUNBUFFERED": "1",
        }
        report = [f"--junitxml={own / 'tests.xml'}"] if job.pytest else []
        before = {path: at for one in job.results for path, at in changes(one).items()}
        with (self._folder / f"{job.name}.log").open("wb", buffering=0) as log:
            log.write(f"$ {more} {job.command}\n".encode())
            process = subprocess.Popen(
                bound([sys.executable, "-m", *job.words, *report]),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                cwd=ROOT, env=environment_with(more), start_new_session=True,
            )  # fmt: skip
        began = self._clock()
        ends_at = min(began + job.limit_s, self._over_at)
        return Running(job, places, ChildProcess(process, job.name), own, began, ends_at, before)

    def _end(self, one: Running, why: str) -> None:
        """Ends what is left of a job, and keeps the results that it has written."""
        one.kill()
        self._running.remove(one)
        self._free += one.places
        results = [path for pattern in one.job.results for path in one.written(pattern)]
        for path in results:
            shutil.copy2(path, one.folder / path.name)
        with suppress(OSError):
            one.folder.rmdir()  # of a job that has written nothing
        self._note(
            one.job,
            "failed" if why else "passed",
            why,
            seconds=round(self._clock() - one.began, 3),
            exit_code=one.child.exit_code,
            tests=one.tests(),
            results=[path.name for path in results],
        )

    def _note(self, job: Job, state: str, why: str = "", **more: Any) -> None:
        """Prints what became of a job, and writes FOLDER/queue.json."""
        entry = msgspec.structs.replace(self.entries[job.name], state=state, why=why, **more)
        self.entries[job.name] = entry
        new = self._folder / "queue.json.new"
        told = {**self._origin, "jobs": list(self.entries.values())}
        new.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")
        new.replace(self._folder / "queue.json")
        print(f"{self._clock() - self._began:7.1f} s  {line_of(entry)}", flush=True)


def line_of(entry: Entry) -> str:
    seconds = "" if entry.seconds is None else f"{entry.seconds:.1f} s"
    return f"{entry.state:8}  {entry.name:32}  {seconds:>9}  {entry.why or entry.decides}"


def places_for(job: Job, free: Sequence[str], places: Sequence[str]) -> list[str]:
    """Returns the places that a job gets of those that are free; empty: they are too few.

    Its GPUs differ, and have the most free places. One that has to be alone gets all there are,
    those of its own GPUs first.
    """
    gpus = sorted(set(free) - {"cpu"}, key=lambda gpu: (-free.count(gpu), int(gpu)))
    own = [*gpus, *(place for place in free if place == "cpu")][: job.gpus]
    if len(own) < job.gpus or (job.alone and len(free) < len(places)):
        return []
    others = list(free) if job.alone else []
    for place in own if job.alone else ():
        others.remove(place)
    return own + others


def changes(pattern: str) -> dict[Path, int]:
    """Returns when the files of a pattern changed last."""
    found = Path("/").glob(str((ROOT / pattern).relative_to("/")))
    return {path: path.stat().st_mtime_ns for path in found}


def session_of(leader: int) -> Iterator[int]:
    """Yields the processes of a session that have not ended."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid


def _places(text: str) -> list[str]:
    places = text.split(",")
    if not all(place == "cpu" or place.isdecimal() for place in places):
        raise argparse.ArgumentTypeError("numbers of GPUs, or cpu for a place without one")
    return [place if place == "cpu" else str(int(place)) for place in places]


def _describe(job: Job) -> str:
    needs = f", after {', '.join(job.after)}" if job.after else ""
    gpus = f"{job.gpus} GPUs, alone" if job.alone else f"{job.gpus} GPUs"
    times = f"{gpus}, about {job.takes_s:g} s, at most {job.limit_s:g} s{needs}"
    return f"{job.name}: {times}\n    {job.command}\n    {job.decides}"


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("plans", nargs="+", metavar="PLAN", help="a name in bench/plans, or a file")
    parser.add_argument("--out", type=Path, help="folder of logs and results")
    parser.add_argument(
        "--gpus",
        type=_places,
        help="by comma, one several times for as many jobs at once; cpu: a place without; "
        "default: each once",
    )
    parser.add_argument("--limit-s", type=float, default=math.inf, help="of all together")
    parser.add_argument("--list", action="store_true", help="what is in the plans, and run nothing")
    arguments = parser.parse_args()
    try:
        arguments.jobs = read_plans(arguments.plans)
    except PlanError as error:
        parser.error(str(error))
    if not arguments.list:
        if arguments.out is None:
            parser.error("--out is needed")
        if arguments.gpus is None:
            gpus = machine()["gpus"]
            assert isinstance(gpus, list)
            arguments.gpus = [str(index) for index in range(len(gpus))]
            if not gpus:
                parser.error("no GPU is here: --gpus cpu runs jobs without one")
    return arguments


def stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(f"the queue got {signal.Signals(number).name}")


def main() -> None:
    arguments = parse_arguments()
    if arguments.list:
        print("\n".join(_describe(job) for job in arguments.jobs))
        return
    folder = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    queue = Queue(arguments.jobs, arguments.gpus, folder, arguments.limit_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with suppress(Stopped):
        queue.run()
    print("\n".join(map(line_of, queue.entries.values())), flush=True)
    sys.exit(any(entry.state == "failed" for entry in queue.entries.values()))


if __name__ == "__main__":
    main()
