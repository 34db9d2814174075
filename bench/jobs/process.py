"""A job's processes: a session of its own, which is ended as a whole."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from bench.jobs.plan import ROOT, Job
from host.child_process import ChildProcess, environment_with
from host.termination import bound

_POLL_S = 0.02
_DEATH_S = 20.0
"""The time that killed processes have to disappear: a driver may hold them for seconds."""


class JobProcess:
    """A job that runs. Its output goes to FOLDER/NAME.log as it comes; a folder NAME beside it
    takes what it writes.

    Args:
        places: CUDA's numbers of devices; `cpu` is a place without one. A job that has to be alone
            holds all, and sees the first, which are its own.
        threads: How many each process may have for computing on the host.
        started: The queue's clock.
    """

    def __init__(
        self, job: Job, places: Sequence[str], threads: int, folder: Path, started: float
    ) -> None:
        self.job = job
        self.started = started
        self.places = tuple(places)
        self.ending = ""
        """Says why it is being ended; empty: it is not."""
        self._was_killed = False
        self._own = folder / job.name
        self._own.mkdir(exist_ok=True)
        self._report.unlink(missing_ok=True)
        self._before = {path: _stamp(path) for path in chain(*job.results_in(self._own))}
        more = {
            "CUDA_VISIBLE_DEVICES": ",".join(gpu for gpu in places[: job.gpus] if gpu != "cpu"),
            "OMP_NUM_THREADS": str(threads),
            "PYTHONUNBUFFERED": "1",
        }
        words = job.words_in(self._own)
        if job.pytest:
            words.append(f"--junitxml={self._report}")
        with (folder / f"{job.name}.log").open("wb", buffering=0) as log:
            settings = " ".join(f"{name}={value}" for name, value in more.items())
            log.write(f"$ {settings} {shlex.join(['python', '-m', *words])}\n".encode())
            process = subprocess.Popen(
                bound([sys.executable, "-m", *words]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment_with(more),
                start_new_session=True,
            )
        self.child = ChildProcess(process, job.name)
        """Is the first process, which leads the session."""

    @property
    def has_ended(self) -> bool:
        """Returns whether nothing more can be done about its first process."""
        return self._was_killed or self.child.exit_code is not None

    def terminate(self, why: str) -> None:
        """Asks all processes of its group to end, and returns at once."""
        self.ending = self.ending or why
        _signal_group(self.child.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Ends what is left of the session, whatever group it is in, and waits for its end.
        Idempotent."""
        if self._was_killed:
            return
        self._was_killed = True
        deadline = time.monotonic() + _DEATH_S
        while (pids := list(session_of(self.child.pid))) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
        if self.child.wait(0.0):
            self.child.reap(0.0)

    def failure(self) -> str:
        """Returns what is wrong with a job that has ended; empty: nothing."""
        code = self.child.exit_code
        if code is None:
            return "it was killed, and has not disappeared"
        if self.ending:
            return self.ending
        if code < 0:
            return self.child.describe_exit().removeprefix(f"{self.job.name} ")
        if code > 0:
            return f"exit code {code}"
        tests = self.tests()
        if self.job.pytest and tests.get("skipped", 0) >= tests.get("tests", 0):
            return "no test ran"
        written = zip(self.job.results, self._written(), strict=True)
        missing = ", ".join(pattern for pattern, files in written if not files)
        return f"did not write {missing}" if missing else ""

    def tests(self) -> dict[str, int]:
        """Returns how many tests ran, failed and were skipped; empty where nothing counted, or was
        ended while writing that down."""
        kinds = ("tests", "failures", "errors", "skipped")
        try:
            suites = list(ElementTree.parse(self._report).iter("testsuite"))
        except (FileNotFoundError, ElementTree.ParseError):
            return {}
        return {kind: sum(int(suite.get(kind, 0)) for suite in suites) for kind in kinds}

    def keep_results(self) -> list[str]:
        """Copies the results that it has written to its own folder, and returns their names."""
        written = list(chain(*self._written()))
        for path in written:
            if not path.is_relative_to(self._own):
                shutil.copy2(path, self._own / path.name)
        with contextlib.suppress(OSError):
            self._own.rmdir()  # of a job that has written nothing
        return [path.name for path in written]

    @property
    def _report(self) -> Path:
        return self._own / "tests.xml"

    def _written(self) -> list[list[Path]]:
        """Returns the results of each pattern that were written since the job began."""
        return [
            [path for path in paths if _stamp(path) != self._before.get(path)]
            for paths in self.job.results_in(self._own)
        ]


def _stamp(path: Path) -> tuple[int, int, int]:
    """Returns what differs once a file has been written again."""
    at = path.stat()
    return at.st_mtime_ns, at.st_size, at.st_ino


def session_of(leader: int) -> Iterator[int]:
    """Yields the processes of a session that have not ended."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(session) == leader and state not in "ZX":
            yield int(stat.parent.name)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
