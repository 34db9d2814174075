"""Makes one engine's statistics of those of its data-parallel groups."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from engine.contracts.outputs import GroupStats, LoRAStats, SchedulerStats


def merged_stats(of_groups: list[SchedulerStats]) -> SchedulerStats:
    """Returns the statistics of data-parallel groups as those of one engine."""
    found = of_groups[0]
    for stats in of_groups[1:]:
        last_step_at = max(found.last_step_at, stats.last_step_at)
        lora = _joined(found.lora, stats.lora)
        found = _sum(replace(found, lora=None), replace(stats, lora=None))
        found.last_step_at, found.lora = last_step_at, lora
    found.groups = [_of_group(stats) for stats in of_groups]
    return found


def _of_group(stats: SchedulerStats) -> GroupStats:
    return GroupStats(*(getattr(stats, name) for name in GroupStats.__struct_fields__))


def _sum(a: Any, b: Any) -> Any:
    """Adds numbers wherever they are in two values of one shape; None counts as nothing."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, msgspec.Struct):
        names = a.__struct_fields__
        return type(a)(**{name: _sum(getattr(a, name), getattr(b, name)) for name in names})
    if isinstance(a, dict):
        return {name: _sum(a.get(name), b.get(name)) for name in (*a, *(b.keys() - a.keys()))}
    if isinstance(a, list):
        length = max(len(a), len(b))
        parts = ([*part, *[0] * (length - len(part))] for part in (a, b))
        return [_sum(x, y) for x, y in zip(*parts, strict=True)]
    return a + b


def _joined(one: LoRAStats | None, other: LoRAStats | None) -> LoRAStats | None:
    """Returns which adapters either has."""
    if one is None or other is None:
        return one or other
    return LoRAStats(
        running=sorted({*one.running, *other.running}),
        waiting=sorted({*one.waiting, *other.waiting}),
        loaded=sorted({*one.loaded, *other.loaded}),
    )
