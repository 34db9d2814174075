"""The record of a long soak: it survives an interruption, and says whether memory grows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench.serving.process_tree import usage

_WIDTH, _HEIGHT, _LEFT = 900, 420, 60
_COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#7b4b94", "#00798c", "#8d96a3", "#3a3a3a")
_LOOKS_TOLD = 40
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


def slopes(looks: Sequence[Look]) -> dict[str, float]:
    """Returns the growth of each process in MiB an hour, by least squares over the looks after the
    warm-up; processes that were started again meanwhile are not in it."""
    if not looks:
        return {}
    kept = [look for look in looks if look.at_s >= looks[-1].at_s * _WARM_UP]
    names = set.intersection(*(set(look.private_mib) for look in kept))
    return {name: round(_slope([(look.at_s, look.private_mib[name]) for look in kept]), 2)
            for name in sorted(names)}  # fmt: skip


def _slope(points: Sequence[tuple[float, float]]) -> float:
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        return 0.0
    return 3600 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def plot(looks: Sequence[Look]) -> str:
    """Returns an SVG of each process's memory over time."""
    names = sorted({name for look in looks for name in look.private_mib})
    most = max((value for look in looks for value in look.private_mib.values()), default=1.0)
    end = max(looks[-1].at_s, 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} '
        f'{_HEIGHT + 16 * len(names)}" font-family="sans-serif" font-size="12">',
        f'<text x="4" y="14">{most:.0f} MiB</text><text x="4" y="{_HEIGHT - 24}">0</text>',
        f'<text x="{_WIDTH - 90}" y="{_HEIGHT - 4}">{end / 60:.0f} minutes</text>',
    ]
    for index, name in enumerate(names):
        points = " ".join(
            f"{_LEFT + (_WIDTH - _LEFT) * look.at_s / end:.1f},"
            f"{(_HEIGHT - 30) * (1 - look.private_mib[name] / most) + 4:.1f}"
            for look in looks
            if name in look.private_mib
        )
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(f'<polyline fill="none" stroke="{colour}" points="{points}"/>')
        parts.append(f'<text x="{_LEFT}" y="{_HEIGHT + 16 * index}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def told(record: Record) -> Mapping[str, object]:
    """Returns what a result file says of all runs; of the last one, some looks."""
    looks = record.runs[-1] if record.runs else []
    some = looks[:: max(1, len(looks) // _LOOKS_TOLD)]
    return {
        "num_runs": len(record.runs),
        "hours": round(sum(run[-1].at_s for run in record.runs if run) / 3600, 3),
        "mib_an_hour": slopes(looks),
        "looks": json.loads(msgspec.json.encode(some)),
    }
