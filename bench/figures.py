"""Figures of many values, as every result has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Figures = dict[str, Any]


def percentile(ordered: Sequence[float], part: float) -> float:
    """Interpolates linearly between the two nearest ranks."""
    rank = (len(ordered) - 1) * part
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


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
