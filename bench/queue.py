#!/usr/bin/env python3
"""Runs plans of measurements on the GPUs of a host, and keeps all that they give.

    python -m bench.queue --list goodput tiers                 # what is in two plans
    python -m bench.queue goodput four_bits --out /tmp/out     # run them on all GPUs
    python -m bench.queue goodput --out /tmp/out --gpus 0,1 --limit-s 590
    python -m bench.queue gpu_tests --out /tmp/out --gpus 0,0,0,0   # four at once on one GPU

A plan is a file of jobs (`bench/jobs/plan.py` says what is in one); bench/plans/ has one for each
question. Jobs of one GPU go to whichever is free, those of two have two, and those whose figures
other work would spoil have the host to themselves. A GPU that is named several times runs this many
jobs at once, for tests; seconds that they measure mean nothing. Each has a time limit and
its whole session is ended at it; a job that fails stops only those that come after it. With
`--limit-s` no job begins that needs longer than is left, and the queue has ended by then.

OUT has the output of each job as NAME.log, its results in the folder NAME, and queue.json: which
machine, versions and commit, and of each job the command, GPUs, seconds and exit code. Files are
written as things happen. Ends with 1 if a job failed. SIGTERM ends the jobs that run, in order.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path

from bench.arguments import parser_of
from bench.jobs.journal import Journal
from bench.jobs.order import Busy, next_job, reason_to_leave_out
from bench.jobs.plan import Job, PlanError, read_plans
from bench.jobs.process import JobProcess
from bench.record import machine, origin

_MOST_THREADS = 16
_OVER = "the queue's time was over"
_MARGIN_S = 5.0
"""The time that killed processes and the last lines may take, of a queue with a limit."""


class Queue:
    """Runs jobs until none can begin any more.

    Args:
        places: CUDA's numbers of the devices, each as often as jobs may share it; each `cpu` is a
            place for a job without one.
        limit_s: The time for all jobs together.
        grace_s: The time that a job has to end when it is asked to.
        clock: Returns seconds that only grow.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        places: Sequence[str],
        folder: Path,
        *,
        limit_s: float = math.inf,
        grace_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._waiting = list(jobs)
        self._places = list(places)
        self._folder = folder
        self._clock = clock
        self._grace_s = grace_s
        self._over_at = clock() + limit_s - grace_s - _MARGIN_S
        self._running: list[JobProcess] = []
        self._kill_at: dict[JobProcess, float] = {}
        self._stopped = ""
        self._wake_up, self._awake = socket.socketpair()
        self.journal = Journal(jobs, folder, origin())

    def run(self) -> None:
        """Returns when all jobs have ended or been left out; none outlives it."""
        try:
            while self._begin_jobs() or self._running:
                self._wait()
                self._take_notes()
                self._end_late_jobs()
                self._take_notes()
        finally:
            for running in self._running:
                running.kill()

    def _wait(self) -> None:
        """Returns when a job has ended, or is to be ended."""
        sentinels = [one.child.sentinel for one in self._running]
        ends = min(self._ends_at(one) for one in self._running)
        if self._awake in wait([*sentinels, self._awake], max(0.0, ends - self._clock())):
            self._awake.recv(1)

    def stop(self, why: str) -> None:
        """Has the jobs that run end, and begins no other. May be called by a signal's handler."""
        self._stopped = why
        self._wake_up.send(b"!")

    def _begin_jobs(self) -> bool:
        """Begins those that may, and returns whether one did."""
        begun = False
        while True:
            now = self._clock()
            self._leave_out(self._over_at - now)
            passed = {name for name, state in self.journal.states.items() if state == "passed"}
            busy = [
                Busy(one.places, max(0.0, one.started + one.job.takes_s - now))
                for one in self._running
            ]
            found = next_job(self._waiting, passed, self._places, busy, self._over_at - now)
            if found is None:
                return begun
            job, places = found
            self._waiting.remove(job)
            threads = len(os.sched_getaffinity(0)) // len(self._places)
            threads = max(1, min(_MOST_THREADS, threads))
            self._running.append(JobProcess(job, places, threads, self._folder, now))
            self.journal.begun(self._running[-1])
            begun = True

    def _leave_out(self, left_s: float) -> None:
        for job in list(self._waiting):
            why = self._stopped or reason_to_leave_out(
                job, self.journal.states, self._places, left_s
            )
            if why:
                self._waiting.remove(job)
                self.journal.left_out(job, why)

    def _ends_at(self, running: JobProcess) -> float:
        own = min(running.started + running.job.limit_s, self._over_at)
        return self._kill_at.get(running, own)

    def _end_late_jobs(self) -> None:
        """Asks jobs to end whose time is over, and ends those that were asked and did not."""
        now = self._clock()
        for running in self._running:
            is_late, limit_s = now >= self._ends_at(running), running.job.limit_s
            if running in self._kill_at:
                if is_late:
                    running.kill()
            elif self._stopped or is_late:
                is_own = now >= running.started + limit_s
                late = f"it took longer than {limit_s:g} s" if is_own else _OVER
                running.terminate(self._stopped or late)
                self._kill_at[running] = now + self._grace_s

    def _take_notes(self) -> None:
        for running in [one for one in self._running if one.has_ended]:
            running.kill()
            self._running.remove(running)
            self._kill_at.pop(running, None)
            self.journal.ended(running, self._clock() - running.started)


def _places(text: str) -> list[str]:
    places = text.split(",")
    if not all(place == "cpu" or place.isdecimal() for place in places):
        raise argparse.ArgumentTypeError("numbers of GPUs, or cpu for a place without one")
    return [place if place == "cpu" else str(int(place)) for place in places]


def _describe(job: Job) -> str:
    needs = f", after {', '.join(job.after)}" if job.after else ""
    gpus = "1 GPU" if job.gpus == 1 else f"{job.gpus} GPUs"
    gpus += ", alone" if job.alone else ""
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
    parser.add_argument("--grace-s", type=float, default=10.0, help="from SIGTERM to SIGKILL")
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


def main() -> None:
    arguments = parse_arguments()
    if arguments.list:
        print("\n".join(_describe(job) for job in arguments.jobs))
        return
    folder = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    limits = {"limit_s": arguments.limit_s, "grace_s": arguments.grace_s}
    queue = Queue(arguments.jobs, arguments.gpus, folder, **limits)
    for number in (signal.SIGTERM, signal.SIGINT):
        name = number.name
        signal.signal(number, lambda *_, name=name: queue.stop(f"the queue got {name}"))
    queue.run()
    print(queue.journal.table(), flush=True)
    sys.exit(int("failed" in queue.journal.states.values()))


if __name__ == "__main__":
    main()
