"""One transfer after the other: what each took of time and CPU, and their medians."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Turn:
    """One transfer. CPU in seconds for each GB; `others`: share of the machine others used."""

    num_bytes: int
    seconds: float
    cpu_send: float
    cpu_receive: float
    others: float

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / 1e9 / self.seconds

    @property
    def cpu(self) -> float:
        return self.cpu_send + self.cpu_receive


Row = dict[str, Any]
"""Holds one transport at one point of a sweep."""


def measure(
    senders: list[int],
    receivers: list[int],
    run: Callable[[], object],
    num_bytes: Callable[[], int],
) -> Turn:
    """Measures one turn; `num_bytes` is asked afterwards."""
    ours = [*senders, *receivers, os.getpid()]
    before = cpu_seconds(senders), cpu_seconds(receivers), cpu_seconds(ours), machine_seconds()
    started = time.perf_counter()
    run()
    elapsed = time.perf_counter() - started
    after = cpu_seconds(senders), cpu_seconds(receivers), cpu_seconds(ours), machine_seconds()
    send, receive, own, busy = (b - a for a, b in zip(before, after, strict=True))
    gigabytes = num_bytes() / 1e9
    others = max(0.0, busy - own) / (elapsed * len(os.sched_getaffinity(0)))
    return Turn(num_bytes(), elapsed, send / gigabytes, receive / gigabytes, others)


def summarise(transport: str, point: int, turns: list[Turn], raw: Sequence[Turn]) -> Row:
    """Returns medians over turns. `raw`: raw TCP's turns beside them, or nothing; rates are
    compared within a turn."""
    rates = [turn.gb_per_s for turn in turns]
    pairs = list(zip(turns, raw, strict=False))
    return {
        "transport": transport,
        "point": point,
        "num_bytes": turns[0].num_bytes,
        "milliseconds": _median([turn.seconds * 1e3 for turn in turns]),
        "gb_per_s": _median(rates),
        "gb_per_s_worst": round(min(rates), 4),
        "gb_per_s_best": round(max(rates), 4),
        "cpu_send_s_per_gb": _median([turn.cpu_send for turn in turns]),
        "cpu_receive_s_per_gb": _median([turn.cpu_receive for turn in turns]),
        "of_raw_tcp": _median([turn.gb_per_s / base.gb_per_s for turn, base in pairs]),
        "cpu_of_raw_tcp": _median([turn.cpu / base.cpu for turn, base in pairs]),
        "others": _median([turn.others for turn in turns]),
        "turns": len(turns),
    }


def cpu_seconds(pids: list[int]) -> float:
    """Returns the CPU time of all threads of these processes so far."""
    total = 0
    for pid in pids:
        for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            total += int(stat.read_text().split()[0])
    return total / 1e9


def machine_seconds() -> float:
    """Returns the time that all cores together were not idle."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    busy = sum(int(field) for i, field in enumerate(fields[:8]) if i not in (3, 4))
    return busy / os.sysconf("SC_CLK_TCK")


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None
