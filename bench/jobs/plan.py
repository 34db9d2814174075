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

import glob
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
PLANS = ROOT / "bench" / "plans"
OUT = "{out}"


class PlanError(ValueError):
    """A plan cannot be read, or cannot be run."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
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


class _File(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    question: str
    job: tuple[_Entry, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One command of a plan.

    Attributes:
        name: PLAN.JOB; names of the queue's files begin with it.
        decides: The figure that it gives, and what follows from it.
        words: What comes behind `python -m`.
        gpus: How many of them it sees, which are its own.
        alone: Whether nothing else may run meanwhile: GPUs of a host share power and cores.
        takes_s: Its seconds as far as known.
        limit_s: The seconds after which it is ended.
        results: Patterns of files; of each it writes one at least.
        after: Names of the jobs that must have passed.
    """

    name: str
    decides: str
    words: tuple[str, ...]
    gpus: int
    alone: bool
    takes_s: float
    limit_s: float
    results: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def is_test(self) -> bool:
        return self.words[0] == "pytest"

    @property
    def command(self) -> str:
        return shlex.join(["python", "-m", *self.words])

    def words_in(self, folder: Path) -> list[str]:
        """Returns what comes behind `python -m`, with the job's folder in place."""
        return [word.replace(OUT, str(folder)) for word in self.words]

    def results_in(self, folder: Path) -> list[list[Path]]:
        """Returns the files that there are of each pattern."""
        escaped = glob.escape(str(folder))
        patterns = [ROOT / name.replace(OUT, escaped) for name in self.results]
        return [sorted(Path("/").glob(str(one.relative_to("/")))) for one in patterns]


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
        except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError, ValueError) as error:
            raise PlanError(f"{path}: {error}") from error
    _check_together(jobs)
    return jobs


def _jobs_of(path: Path) -> list[Job]:
    plan = msgspec.convert(tomllib.loads(path.read_text()), _File)
    jobs: list[Job] = []
    for entry in plan.job:
        known = {job.name for job in jobs}
        after = tuple(f"{path.stem}.{name}" for name in entry.after)
        words = _words(entry)
        if unknown := set(after) - known:
            raise ValueError(f"{entry.name} comes after {', '.join(unknown)}, none of those before")
        if entry.gpus < 1 or entry.limit_s <= 0 or entry.takes_s > entry.limit_s:
            raise ValueError(f"{entry.name}: at least one GPU, and takes_s within limit_s")
        if not set(entry.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-"):
            raise ValueError(f"{entry.name!r} has to name files: a-z, 0-9, _ and -")
        job = Job(
            name=f"{path.stem}.{entry.name}",
            decides=entry.decides,
            words=words,
            gpus=entry.gpus,
            alone=entry.alone,
            takes_s=entry.takes_s or entry.limit_s,
            limit_s=entry.limit_s,
            results=entry.results,
            after=after,
        )
        jobs.append(job)
    return jobs


def _words(entry: _Entry) -> tuple[str, ...]:
    if bool(entry.run) == bool(entry.pytest):
        raise ValueError(f"{entry.name} needs one of run and pytest")
    return tuple(shlex.split(entry.run) or ["pytest", *shlex.split(entry.pytest)])


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
