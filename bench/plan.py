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
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
PLANS = ROOT / "bench" / "plans"


class PlanError(ValueError):
    """A plan cannot be read, or cannot be run."""


class Job(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One command of a plan; its fields are those of the file, `name` is PLAN.JOB.

    Attributes:
        gpus: How many of them it sees, which are its own.
        alone: Whether nothing else may run meanwhile: GPUs of a host share power and cores.
        results: Patterns of files; of each it writes one at least.
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


class _File(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    question: str
    job: tuple[Job, ...]


def read_plans(names: Sequence[str]) -> list[Job]:
    """Returns the jobs of all plans in order, each a path or a name in bench/plans.

    Raises:
        PlanError: With the plan's name and what is wrong.
    """
    jobs: dict[str, Job] = {}
    writers: dict[str, str] = {}
    for name in dict.fromkeys(names):
        path = Path(name) if name.endswith(".toml") else PLANS / f"{name}.toml"
        try:
            for job in msgspec.convert(tomllib.loads(path.read_text()), _File).job:
                whole = _checked(job, path.stem, jobs)
                for result in whole.results:
                    if (writer := writers.setdefault(result, whole.name)) != whole.name:
                        raise ValueError(f"{writer} and {whole.name} both write {result}")
                jobs[whole.name] = whole
        except (OSError, ValueError) as error:
            raise PlanError(f"{path}: {error}") from error
    return list(jobs.values())


def _checked(job: Job, plan: str, before: dict[str, Job]) -> Job:
    """Returns a job with its plan's name before its own. Raises ValueError."""
    name, after = f"{plan}.{job.name}", tuple(f"{plan}.{one}" for one in job.after)
    if bool(job.run) == bool(job.pytest):
        raise ValueError(f"{name} needs one of run and pytest")
    if unknown := set(after) - set(before):
        raise ValueError(f"{name} comes after {', '.join(unknown)}, none of those before")
    if job.gpus < 1 or job.limit_s <= 0 or job.takes_s > job.limit_s:
        raise ValueError(f"{name}: at least one GPU, and takes_s within limit_s")
    if not re.fullmatch("[a-z0-9_-]+", job.name):
        raise ValueError(f"{job.name!r} has to name files: a-z, 0-9, _ and -")
    if name in before:
        raise ValueError(f"two jobs are called {name}")
    takes_s = job.takes_s or job.limit_s
    return msgspec.structs.replace(job, name=name, after=after, takes_s=takes_s)
