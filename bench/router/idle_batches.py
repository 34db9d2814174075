#!/usr/bin/env python3
"""Measures what batches on capacity that nothing else uses cost others, in virtual time.

Each case runs twice with the same requests, alone and beside a batch without end. Nodes have the
steps of Llama-3.1-8B on H200s; load 1.0 is what the prefill nodes can just compute.

    python -m bench.router.idle_batches
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.engine.speed_profiles import PROFILES
from bench.record import write_result
from bench.router.simulated_case import Case, policy_maker, requests_of
from engine.speed.profile import load_profile
from planner.simulation.cluster import ClusterShape, SimCluster
from planner.simulation.measured import Measured, weighted_quantiles
from planner.simulation.step_filling import prompt_order
from planner.simulation.step_times import MeasuredTimes

_BUDGET = 8192
_WARM_PART = 0.15
_SHAPES = ((1, 1), (4, 4), (16, 8))
_LOADS = (0.1, 0.3, 0.6, 0.9)
_OBJECTIVES_S = (0.0, 0.015)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Is one case. Seconds; `batch_*` beside others; `used_*` are busy parts of a tier's time."""

    num_prefill: int
    num_decode: int
    load: float
    itl_objective_s: float
    ttft_p50_s: float
    ttft_p50_beside_s: float
    ttft_p99_s: float
    ttft_p99_beside_s: float
    ttft_p99_ratio: float
    itl_p50_s: float
    itl_p50_beside_s: float
    itl_p99_s: float
    itl_p99_beside_s: float
    used_prefill: float
    used_prefill_beside: float
    batch_tokens_per_s: float


def cost(
    num_prefill: int, num_decode: int, load: float, count: int, seed: int, objective_s: float = 0.0
) -> Cost:
    steps = MeasuredTimes(load_profile(Path(PROFILES) / "h200-llama-3.1-8b.json"))
    shape = ClusterShape(
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_routers=1,
        steps=steps,
        batched=True,
        make_fill=partial(prompt_order, steps, _BUDGET),
        max_batched_tokens=_BUDGET,
        itl_objective_s=objective_s,
        reports_always=True,
    )
    case = Case(group="batches", label="", load=load, workload="equal", count=count, shape=shape)
    requests, _ = requests_of("equal", num_prefill, load, count, seed, steps)
    batch, _ = requests_of("1000-300", num_prefill, load, 1000, seed + 1, steps)
    runs = [_run(case, seed, requests, given) for given in ((), batch)]
    (alone, cluster), (beside, busy) = runs
    seconds = requests[-1].at_s
    quantiles = [_quantiles(measured) for measured in (alone, beside)]
    itl = [weighted_quantiles(measured.gaps, (0.5, 0.99)) for measured in (alone, beside)]
    return Cost(
        num_prefill=num_prefill,
        num_decode=num_decode,
        load=load,
        itl_objective_s=objective_s,
        ttft_p50_s=quantiles[0][0],
        ttft_p50_beside_s=quantiles[1][0],
        ttft_p99_s=quantiles[0][1],
        ttft_p99_beside_s=quantiles[1][1],
        ttft_p99_ratio=quantiles[1][1] / quantiles[0][1],
        itl_p50_s=itl[0][0],
        itl_p50_beside_s=itl[1][0],
        itl_p99_s=itl[0][1],
        itl_p99_beside_s=itl[1][1],
        used_prefill=_used(cluster, seconds),
        used_prefill_beside=_used(busy, seconds),
        batch_tokens_per_s=beside.num_batch_tokens / seconds,
    )


def _run(case: Case, seed: int, requests: Any, batch: Any) -> tuple[Measured, SimCluster]:
    cluster = SimCluster(case.shape, policy_maker(case), seed)
    return cluster.run(requests, _WARM_PART, batch), cluster


def _quantiles(measured: Measured) -> tuple[float, float]:
    ttft = sorted(measured.ttft_s)
    return statistics.median(ttft), ttft[int(0.99 * len(ttft))]


def _used(cluster: SimCluster, seconds: float) -> float:
    return statistics.fmean(node.engine.busy_s for node in cluster.prefills) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=4000)
    args = parser.parse_args()
    found = []
    for objective_s, shape, load in itertools.product(_OBJECTIVES_S, _SHAPES, _LOADS):
        one = cost(*shape, load, args.count, 0, objective_s)
        found.append(one)
        print(told(one), flush=True)
    write_result("idle_batches", [asdict(one) for one in found])


def told(one: Cost) -> str:
    before = one.ttft_p50_s, one.ttft_p99_s, one.itl_p50_s, one.itl_p99_s
    beside = (
        one.ttft_p50_beside_s,
        one.ttft_p99_beside_s,
        one.itl_p50_beside_s,
        one.itl_p99_beside_s,
    )
    figures = " ".join(
        f"{name} {1000 * a:.1f} -> {1000 * b:.1f}"
        for name, a, b in zip(("TTFT p50", "p99", "ITL p50", "p99"), before, beside, strict=True)
    )
    shape = f"{one.num_prefill}P{one.num_decode}D at {one.load:.1f}"
    objective = f"{1000 * one.itl_objective_s:.0f} ms"
    return f"{shape}, objective {objective}: {figures}, batch {one.batch_tokens_per_s:.0f} tokens/s"


if __name__ == "__main__":
    main()
