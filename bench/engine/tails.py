#!/usr/bin/env python3
"""Tails of decode steps: each of thousands of steps beside the median of its neighbours, and what
was different in the worst ones.

    python -m bench.engine.tails                                    # 100 rows, FP8, 3000 steps
    python -m bench.engine.tails --rows 16 --quantization '' --steps 1000

All rows decode from the first step that counts to the last; nothing comes or ends. Contexts grow,
so a step is compared with the 101 steps around it. Of a step that took long: what the worker's host
took to start it, for how long it lay with the worker before (below 0, the device had to wait), how
long this process, which has the scheduler, ran and collected garbage, and how often the system took
the core away from either process. Results: bench/results/NAME.json.
"""

from __future__ import annotations

import gc
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from pathlib import Path

from bench.arguments import add_model, parser_of
from bench.engine.models.shapes import shape_config
from bench.figures import percentile
from bench.record import write_result
from engine.speed.offline_engine import OfflineEngine, StepResult, offline_engine

_AROUND = 50
_WORST = 20


@dataclass(frozen=True, slots=True)
class Sums:
    """Holds what had come together when a step's result came: milliseconds, and how often."""

    host_ms: float
    core_cpu_ms: float
    garbage_ms: float
    core_preempted: float
    worker_preempted: float


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `ratio`: to the median around it. `of_it`: what came together meanwhile."""

    index: int
    ms: float
    ahead_ms: float
    of_it: Sums
    ratio: float = 0.0


class Watch:
    """Notes for each step of a full batch when its result came and what had come together."""

    def __init__(self, engine: OfflineEngine, rows: int) -> None:
        self._engine, self._rows = engine, rows
        self._seen: list[tuple[float, float, Sums]] = []
        self._garbage_s = 0.0
        self._collects_since = 0.0

    def on_step(self, step: StepResult) -> None:
        if step.num_tokens == self._rows:
            self._seen.append((step.at, 1e3 * (self._engine.executor.ahead_s or 0.0), self._sums()))

    def on_garbage(self, phase: str, info: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._collects_since = now
        else:
            self._garbage_s += now - self._collects_since

    def _sums(self) -> Sums:
        executor = self._engine.executor
        own = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        others = sum(map(_preemptions, executor.worker_pids))
        return Sums(
            1e3 * executor.host_s, 1e3 * time.process_time(), 1e3 * self._garbage_s, own, others
        )

    def steps(self) -> list[Step]:
        """Returns the steps between results that followed each other."""
        found = []
        for index, ((before, _, sums), (at, ahead_ms, later)) in enumerate(pairwise(self._seen)):
            more = [b - a for a, b in zip(astuple(sums), astuple(later), strict=True)]
            rounded = Sums(*(round(one, 3) for one in more))
            found.append(Step(index, round(1e3 * (at - before), 3), round(ahead_ms, 3), rounded))
        return found


def _preemptions(pid: int) -> int:
    """Returns how often the system took a core away from any thread of a process."""
    found = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        found += int(status.read_text().rpartition("nonvoluntary_ctxt_switches:")[2])
    return found


def compared(steps: Sequence[Step]) -> list[Step]:
    """Returns the steps with their ratio to the median of those around them."""
    found = []
    for index, step in enumerate(steps):
        first = max(0, min(index - _AROUND, len(steps) - 2 * _AROUND - 1))
        middle = statistics.median(one.ms for one in steps[first : first + 2 * _AROUND + 1])
        found.append(
            Step(step.index, step.ms, step.ahead_ms, step.of_it, round(step.ms / middle, 3))
        )
    return found


def measure(engine: OfflineEngine, rows: int, context: int, num_steps: int) -> list[Step]:
    """Runs one batch. Steps in which not all rows have a token do not count."""
    watch = Watch(engine, rows)
    gc.callbacks.append(watch.on_garbage)
    try:
        engine.run([engine.request(context, num_steps) for _ in range(rows)], watch.on_step)
    finally:
        gc.callbacks.remove(watch.on_garbage)
    return compared(watch.steps())


def main() -> None:
    parser = parser_of(__doc__, "tails")
    add_model(parser, "llama-3.1-8b", "fp8")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3000)
    arguments = parser.parse_args()
    config = shape_config(
        arguments.shape, device=arguments.device, quantization=arguments.quantization
    )
    with offline_engine(config) as engine:
        engine.run([engine.request(100, 20) for _ in range(4)])
        steps = measure(engine, arguments.rows, arguments.context, arguments.steps)
    ratios = [step.ratio for step in steps]
    shares = {
        f"p{100 * share:g}": round(percentile(ratios, share), 3)
        for share in (0.5, 0.9, 0.99, 0.999)
    }
    worst = sorted(steps, key=lambda step: -step.ratio)[:_WORST]
    for step in worst:
        print(step)
    print(f"{len(steps)} steps, median {statistics.median(s.ms for s in steps)} ms; {shares}")
    figures = {
        "rows": arguments.rows,
        "steps": len(steps),
        "ratios": {**shares, "most": max(ratios)},
        "worst": [asdict(step) for step in worst],
        "first": [step.ms for step in steps[:40]],
    }
    print(write_result(arguments.name, figures))


if __name__ == "__main__":
    main()
