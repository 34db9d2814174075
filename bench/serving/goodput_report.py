"""Goodput from rows of `bench.serving.goodput`, or of a peer's JSON lines: requests a second for
which the objectives hold, as a table."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Figures, markdown


@dataclass(frozen=True, slots=True)
class Objectives:
    """Holds what 99 in 100 first tokens, and times between tokens, do not exceed: milliseconds."""

    ttft_p99_ms: float
    itl_p99_ms: float

    def met_by(self, row: Figures) -> bool:
        """Returns whether the run as a whole was within them; requests that failed are not."""
        ttft, itl = row["ttft_ms"], row["itl_ms"]
        if ttft is None or itl is None or row.get("errors"):
            return False
        return ttft["p99"] <= self.ttft_p99_ms and itl["p99"] <= self.itl_p99_ms


def workload_of(row: Figures) -> str:
    return f"{row['n_in']}/{row['n_out']}"


def goodput(rows: Sequence[Figures], objectives: Objectives) -> list[Figures]:
    """Returns one entry for each engine and workload: the highest rate offered up to which every
    measured one was within the objectives, all together and for each GPU (None: unknown number).
    0: not even the lowest was."""
    groups: defaultdict[tuple[str, str], list[Figures]] = defaultdict(list)
    for row in rows:
        groups[row["engine"], workload_of(row)].append(row)
    found = []
    for (engine, workload), members in groups.items():
        members.sort(key=lambda row: row["qps"])
        best = 0.0
        for row in members:
            if not objectives.met_by(row):
                break
            best = row["qps"]
        gpus = members[0].get("gpus")
        found.append(
            {
                "engine": engine,
                "workload": workload,
                "gpus": gpus,
                "req_per_s": best,
                "req_per_s_per_gpu": round(best / gpus, 3) if gpus else None,
                "is_highest_measured": best == members[-1]["qps"],
                "rates": [row["qps"] for row in members],
            }
        )
    return found


def read_rows(path: Path) -> list[Figures]:
    """Reads rows of loads: JSON lines of a client, which say nothing of GPUs, or a result of
    `bench.serving.goodput`. Their engines get the file's name, so that no two are mixed up. Raises
    ValueError."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    else:
        rows = json.loads(text)["figures"]["loads"]
    rows = [row for row in rows if row.get("kind") == "load" and "ttft_ms" in row]
    if not rows:
        raise ValueError(f"{path} has no row of a load")
    return [{**row, "engine": f"{row['engine']}, {path.stem}"} for row in rows]


def tables(
    rows: Sequence[Figures], objectives: Objectives, beside: Sequence[Figures]
) -> Iterator[str]:
    """Yields a table in milliseconds at the client, and a line for each goodput."""
    head = "engine, in/out, req/s, done, errors, TTFT p50/p99, ITL p50/p99/max, late p99, within"
    cells = [
        (
            row["engine"], workload_of(row), f"{row['qps']:g}", f"{row['done']}/{row['sent']}",
            str(sum((row["errors"] or {}).values())),
            _cell(row["ttft_ms"], "p50", "p99"), _cell(row["itl_ms"], "p50", "p99", "max"),
            _cell(row["late_ms"], "p99"), "yes" if objectives.met_by(row) else "no",
        )
        for row in sorted([*rows, *beside], key=lambda row: (workload_of(row), row["qps"]))
    ]  # fmt: skip
    yield markdown(head, cells)
    for one in goodput([*rows, *beside], objectives):
        each = "" if one["req_per_s_per_gpu"] is None else f", {one['req_per_s_per_gpu']:g} a GPU"
        yield f"{one['engine']} {one['workload']}: {one['req_per_s']:g} req/s{each}"


def _cell(figures: Figures | None, *names: str) -> str:
    return "" if figures is None else "/".join(f"{figures[name]:.1f}" for name in names)
