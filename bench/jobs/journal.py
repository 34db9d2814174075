"""Tells what became of the jobs of a queue: lines as they begin and end, a file, and a table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.jobs.plan import Job
from bench.jobs.process import JobProcess

State = Literal["waiting", "running", "passed", "failed", "left out"]


class Entry(msgspec.Struct, frozen=True):
    """Tells what became of a job.

    Attributes:
        why: Why it failed or was left out; empty: it did not.
        gpus: CUDA's numbers of those that it had, each as often as it had a place there.
        tests: How many ran, failed and were skipped, of a job of tests.
        results: Files that it wrote, in its folder.
    """

    name: str
    decides: str
    command: str
    state: State = "waiting"
    why: str = ""
    gpus: tuple[str, ...] = ()
    seconds: float | None = None
    exit_code: int | None = None
    tests: dict[str, int] = msgspec.field(default_factory=dict)
    results: list[str] = msgspec.field(default_factory=list)


class Journal:
    """Writes FOLDER/queue.json anew whenever a job has begun, ended or been left out."""

    def __init__(self, jobs: Sequence[Job], folder: Path, origin: dict[str, object]) -> None:
        self.entries = {job.name: Entry(job.name, job.decides, job.command) for job in jobs}
        self._path = folder / "queue.json"
        self._origin = origin
        self._began = time.monotonic()
        self._width = max((len(name) for name in self.entries), default=0)
        self._write()

    @property
    def states(self) -> dict[str, State]:
        return {name: entry.state for name, entry in self.entries.items()}

    def begun(self, running: JobProcess) -> None:
        places = dict.fromkeys(running.places)
        where = ", ".join("the CPU" if place == "cpu" else f"GPU {place}" for place in places)
        self._note(running.job, f"on {where}", state="running", gpus=running.places)

    def ended(self, running: JobProcess, seconds: float) -> None:
        """Takes note of a job whose processes are gone."""
        why = running.failure()
        self._note(
            running.job,
            f"{seconds:.1f} s" + (f": {why}" if why else ""),
            state="failed" if why else "passed",
            why=why,
            seconds=round(seconds, 3),
            exit_code=running.child.exit_code,
            tests=running.tests(),
            results=running.keep_results(),
        )

    def left_out(self, job: Job, why: str) -> None:
        self._note(job, why, state="left out", why=why)

    def table(self) -> str:
        lines = []
        for entry in self.entries.values():
            seconds = "" if entry.seconds is None else f"{entry.seconds:.1f} s"
            about = entry.why or entry.decides
            lines.append(f"{entry.name:{self._width}}  {entry.state:8}  {seconds:>9}  {about}")
        return "\n".join(lines)

    def _note(self, job: Job, about: str, **changed: Any) -> None:
        entry = msgspec.structs.replace(self.entries[job.name], **changed)
        self.entries[job.name] = entry
        self._write()
        what = "begins" if entry.state == "running" else entry.state
        seconds = time.monotonic() - self._began
        print(f"{seconds:7.1f} s  {what:8}  {entry.name:{self._width}}  {about}", flush=True)

    def _write(self) -> None:
        told = {**self._origin, "jobs": list(self.entries.values())}
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")
        new.replace(self._path)
