"""The record of a long soak: it survives an interruption, and says whether memory grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from bench.serving.clusters.processes import usage

_LOOKS_TOLD = 40
_NUM_BATCHES = 10
_STUDENT = 2.306
"""The quantile of Student's t that leaves 2.5 % above it, for a line through that many points."""
_WARM_UP = 1 / 3
"""The part of a run whose memory does not count: caches and pools fill."""


@dataclass(slots=True)
class Look:
    """Tells what each process holds at a time, in seconds since the run began, and what is done."""

    at_s: float
    num_done: int
    private_mib: dict[str, float]
    open_files: dict[str, int]


@dataclass(slots=True)
class Record:
    """All runs of one soak, which goes on where it was interrupted. A run is a cluster's life.

    Attributes:
        texts: What each prompt's answer is, for every run.
    """

    num_done: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    kills: dict[str, int] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    runs: list[list[Look]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Returns what was saved; an empty record where nothing was."""
        if not path.exists():
            return cls()
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def look(self, at_s: float, pids: Sequence[int | None], names: Sequence[str]) -> None:
        """Notes what the processes below these hold now."""
        found = {
            f"{name} {module}": used
            for pid, name in zip(pids, names, strict=True)
            if pid
            for module, used in sorted(usage(pid).items())
        }
        memory = {name: used.private_mib for name, used in found.items()}
        files = {name: used.fds for name, used in found.items()}
        self.runs[-1].append(Look(at_s, self.num_done, memory, files))

    def save(self, path: Path) -> None:
        """Writes it whole or not at all."""
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(self))
        part.replace(path)


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of one process: least squares through means of its memory over `_NUM_BATCHES`
    stretches of time, since looks that follow each other are alike. `low`, `high`: the interval
    that has it with 95 %."""

    mib_an_hour: float
    low: float
    high: float
    mib_per_1000_requests: float


def growth(looks: Sequence[Look]) -> dict[str, Growth]:
    """Returns the growth of each process that lived from the end of the warm-up to the last look;
    of none where there are too few looks."""
    kept = after_warm_up(looks)
    if len(kept) < _NUM_BATCHES:
        return {}
    requests_an_hour = _line([(look.at_s, float(look.num_done)) for look in kept])[0]
    found = {}
    for name in survivors(kept):
        points = np.array([(look.at_s, look.private_mib[name]) for look in kept])
        slope, error = _line([one.mean(0) for one in np.array_split(points, _NUM_BATCHES)])
        found[name] = Growth(
            round(slope, 2),
            round(slope - _STUDENT * error, 2),
            round(slope + _STUDENT * error, 2),
            round(1000 * slope / requests_an_hour, 4) if requests_an_hour else 0.0,
        )
    return found


def after_warm_up(looks: Sequence[Look]) -> Sequence[Look]:
    return [look for look in looks if look.at_s >= looks[-1].at_s * _WARM_UP]


def survivors(looks: Sequence[Look]) -> list[str]:
    """Returns the processes that each of these saw."""
    return sorted(set.intersection(*(set(look.private_mib) for look in looks)) if looks else ())


def _line(points: npt.ArrayLike) -> tuple[float, float]:
    """Returns the slope an hour of the line through points in seconds, and its standard error."""
    at_s, values = np.transpose(points)
    if not np.ptp(at_s):
        return 0.0, 0.0
    (slope, _), errors = np.polyfit(at_s / 3600, values, 1, cov=True)
    return float(slope), float(errors[0, 0] ** 0.5)


def plot(looks: Sequence[Look], path: Path) -> None:
    """Draws the memory over time of each process that lived on after the warm-up."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name in survivors(after_warm_up(looks)):
        seen = [look for look in looks if name in look.private_mib]
        axes.plot([look.at_s / 60 for look in seen], [look.private_mib[name] for look in seen],
                  label=name)  # fmt: skip
    axes.set(xlabel="minutes", ylabel="MiB of its own", ylim=(0, None))
    axes.legend(fontsize=6)
    figure.savefig(path)


def record_figures(record: Record) -> Mapping[str, object]:
    """Returns what a result file says of all runs; of the last one, growth, and some looks at
    processes that lived on behind the warm-up."""
    looks = record.runs[-1] if record.runs else []
    kept = after_warm_up(looks)
    some = looks[:: max(1, len(looks) // _LOOKS_TOLD)]
    grown = growth(looks)
    return {
        "num_runs": len(record.runs),
        "hours": round(sum(run[-1].at_s for run in record.runs if run) / 3600, 3),
        "warm_up_s": round(kept[0].at_s) if kept else 0,
        "growth": {name: asdict(one) for name, one in grown.items()},
        "most_mib_an_hour": max((one.mib_an_hour for one in grown.values()), default=None),
        "highest_bound_mib_an_hour": max((one.high for one in grown.values()), default=None),
        "looks": [_only(look, survivors(kept)) for look in some],
    }


def _only(look: Look, names: Sequence[str]) -> dict[str, object]:
    held = {name: [look.private_mib[name], look.open_files[name]]
            for name in names if name in look.private_mib}  # fmt: skip
    return {"at_s": look.at_s, "num_done": look.num_done, "mib_and_open_files": held}
