"""Plans of measurements: TOML files of jobs, each with the figure that it decides.

    question = "Does the last layer of sampled tokens alone become the default?"

    [[job]]
    name = "variants"
    run = 'bench.engine.speed --cases prompt'    # or pytest = "-m gpu tests"
    decides = "sampled-rows becomes the default if 4 x 2048 takes <= 0.985 of now"
    gpus = 1
    alone = true                                            # no other job meanwhile; default: false
    takes_s = 120                                           # about: what still fits; default: all
    limit_s = 300
    results = ["bench/results/engine-llama-3.1-8b.json"]    # that it has to write; * is any name
    after = ["correct"]                                     # jobs in front that have to pass

`{out}` in `run` and `results` is a folder of the job's own, below that of the queue.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Sequence
from glob import escape
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
PLANS = ROOT / "bench" / "plans"
OUT = "{out}"


class PlanError(ValueError):
    """A plan cannot be read, or cannot be run."""


class Job(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One command of a plan.

    Attributes:
        name: PLAN.JOB; names of the queue's files begin with it.
        decides: The figure that it gives, and what follows from it.
        gpus: How many of them it sees, which are its own.
        limit_s: The seconds after which it is ended.
        takes_s: Its seconds as far as known.
        alone: Whether nothing else may run meanwhile: GPUs of a host share power and cores.
        results: Patterns of files; of each it writes one at least.
        after: Names of the jobs that must have passed.
    """

    name: str
    decides: str
    gpus: int
    limit_s: float
    takes_s: float = 0.0
    alone: bool = False
    run: str = ""
    pytest: str = ""
    results: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """Returns what comes behind `python -m`."""
        return shlex.split(self.run) or ["pytest", *shlex.split(self.pytest)]

    @property
    def command(self) -> str:
        return shlex.join(["python", "-m", *self.words])

    def words_in(self, folder: Path) -> list[str]:
        """Returns what comes behind `python -m`, with the job's folder in place."""
        return [word.replace(OUT, str(folder)) for word in self.words]

    def results_in(self, folder: Path) -> list[list[Path]]:
        """Returns the files that there are of each pattern."""
        patterns = [ROOT / name.replace(OUT, escape(str(folder))) for name in self.results]
        return [sorted(Path("/").glob(str(one.relative_to("/")))) for one in patterns]


class _File(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    question: str
    job: tuple[Job, ...]


def read_plans(names: Sequence[str]) -> list[Job]:
    """Returns the jobs of all plans in order, each a path or a name in bench/plans.

    Raises:
        PlanError: With the plan's name and what is wrong.
    """
    jobs: list[Job] = []
    for name in dict.fromkeys(names):
        path = Path(name) if name.endswith(".toml") else PLANS / f"{name}.toml"
        try:
            jobs += _jobs_of(path)
        except (OSError, msgspec.ValidationError, ValueError) as error:
            raise PlanError(f"{path}: {error}") from error
    _check_together(jobs)
    return jobs


def _jobs_of(path: Path) -> list[Job]:
    jobs: list[Job] = []
    for job in msgspec.convert(tomllib.loads(path.read_text()), _File).job:
        if bool(job.run) == bool(job.pytest):
            raise ValueError(f"{job.name} needs one of run and pytest")
        if unknown := set(job.after) - {one.name.partition(".")[2] for one in jobs}:
            raise ValueError(f"{job.name} comes after {', '.join(unknown)}, none of those before")
        if job.gpus < 1 or job.limit_s <= 0 or job.takes_s > job.limit_s:
            raise ValueError(f"{job.name}: at least one GPU, and takes_s within limit_s")
        if not re.fullmatch("[a-z0-9_-]+", job.name):
            raise ValueError(f"{job.name!r} has to name files: a-z, 0-9, _ and -")
        whole = msgspec.structs.replace(
            job,
            name=f"{path.stem}.{job.name}",
            takes_s=job.takes_s or job.limit_s,
            after=tuple(f"{path.stem}.{name}" for name in job.after),
        )
        jobs.append(whole)
    return jobs


def _check_together(jobs: list[Job]) -> None:
    names: set[str] = set()
    writers: dict[str, str] = {}
    for job in jobs:
        if job.name in names:
            raise PlanError(f"two jobs are called {job.name}")
        names.add(job.name)
        for result in job.results:
            writer = writers.setdefault(result, job.name)
            if writer != job.name and not result.startswith(OUT):
                raise PlanError(f"{writer} and {job.name} both write {result}")
