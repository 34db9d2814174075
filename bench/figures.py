"""Figures of many values, as every result has them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Figures = dict[str, Any]


def percentile(ordered: Sequence[float], part: float) -> float:
    """Interpolates linearly between the two nearest ranks."""
    return float(np.quantile(ordered, part))


def markdown(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Returns a table. `head`: its headings, by comma."""
    names = head.split(", ")
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rows))


def one_queue(prompts: Sequence[tuple[float, float]], num_servers: int) -> list[float]:
    """Returns what each of `prompts` (arrival, service) would wait and take if servers took them
    from one queue, in order: nothing knows better without knowing lengths. Seconds."""
    free_at, found = [0.0] * num_servers, []
    for at_s, service_s in prompts:
        end = max(at_s, free_at[0]) + service_s
        heapq.heapreplace(free_at, end)
        found.append(end - at_s)
    return found


def distribution(values: Sequence[float], unit: float = 1.0) -> Figures | None:
    """Returns the mean and quantiles of values, each times `unit`. None: there are no values."""
    if not values:
        return None
    ordered = sorted(value * unit for value in values)
    return {
        "mean": round(math.fsum(ordered) / len(ordered), 3),
        **{f"p{q}": round(percentile(ordered, q / 100), 3) for q in (50, 90, 95, 99)},
        "max": round(ordered[-1], 3),
        "n": len(ordered),
    }


def distribution_ms(seconds: Sequence[float]) -> Figures | None:
    return distribution(seconds, 1e3)
