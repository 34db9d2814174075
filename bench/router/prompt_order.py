#!/usr/bin/env python3
"""Compares orders of prompts on prefill nodes in virtual time.

The router's own code places requests on simulated nodes, whose times are a measured profile's
(`planner/profiles`). `bench.router.orders` has the orders: the scheduler's own code, and others
that were published, in their simplest form.

    python -m bench.router.prompt_order                     everything, about a minute
    python -m bench.router.prompt_order --only equal,long
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from bench.name_lists import names_among
from bench.record import write_result
from bench.router.orders import (
    BUDGET,
    Node,
    StaggeredCluster,
    order_of,
)
from engine.speed.profile import load_profile
from planner.simulation.cluster import ClusterShape, SimCluster
from planner.simulation.measured import weighted_quantiles
from planner.simulation.step_times import MeasuredTimes, StepTimes
from planner.traffic.traffic import Arrival, Traffic
from router.nodes.registry import NodeRegistry
from router.placement.choose_policy import PolicyName, choose_policy
from router.placement.policy import Policy
from router.placement.tandem_policy import TandemParameters

PROFILES = Path(__file__).resolve().parents[2] / "planner" / "profiles"
DENSE, EXPERTS = "h200-llama-3.1-8b", "h200-qwen3-30b-a3b"
LONG = Arrival(5.0, 120_000, 1)
SLO_TIMES, LEAST_SLO_S = 5.0, 0.2
"""A first token is in time within so many times what its prompt takes alone, or so many seconds."""
ORDERS = (
    "arrival, budget 8192", "arrival", "shortest first", "aged", "urgency", "two queues",
    "layers", "tandem",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: `order` on `nodes` prefill nodes (0: undivided ones) that are busy `load`."""

    group: str
    order: str
    load: float
    profile: str = DENSE
    nodes: int = 1
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run's figures, in milliseconds. `slowdown`: a first token's time over what its prompt
    takes alone. `held`: what the prompt of 120k tokens added to the time of short ones, over what
    they take alone; of those it added anything to. `long_s`: that prompt's own first token, or
    the 99th percentile of those above 8000 tokens, in seconds."""

    group: str
    order: str
    profile: str
    nodes: int
    load: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    slowdown_p50: float
    slowdown_p99: float
    in_time: float
    long_s: float = 0.0
    held_p50: float = 0.0
    held_p99: float = 0.0
    held_twice: float = 0.0
    """The part of those that waited more than twice their own time for it."""
    itl_mean: float = 0.0
    itl_p99: float = 0.0


@cache
def node_of(profile: str) -> Node:
    return Node(MeasuredTimes(load_profile(PROFILES / f"{profile}.json")))


# Workloads ---------------------------------------------------------------------------------------


def equal(rng: random.Random) -> int:
    return 2000


def mixed(rng: random.Random) -> int:
    return round(math.exp(rng.uniform(math.log(50), math.log(16_000))))


def short(rng: random.Random) -> int:
    return round(math.exp(rng.uniform(math.log(200), math.log(2000))))


LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "equal": equal, "cluster": equal, "experts": equal, "mixed": mixed, "long": short,
    "undivided": mixed,
}  # fmt: skip
COUNTS = {"long": 3000, "undivided": 1500}


def arrivals(case: Case, node: Node) -> list[Arrival]:
    """Returns requests that come at random (Poisson) and keep the nodes as busy as `load` says, if
    each prompt were computed alone."""
    rng, length = random.Random(case.seed), LENGTHS[case.group]
    count = COUNTS.get(case.group, 4000)
    lengths = [length(rng) for _ in range(count)]
    rate = case.load * max(1, case.nodes) / statistics.fmean(map(node.alone_s, lengths))
    outputs = 150 if case.nodes == 0 else 1
    at_s, found = 0.0, []
    for num_prompt in lengths:
        at_s += rng.expovariate(rate)
        found.append(Arrival(at_s, num_prompt, outputs))
    return found


# Runs --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Answers:
    """Holds what clients saw: arrivals and seconds to their first token, gaps between tokens."""

    ttft: list[tuple[Arrival, float]]
    gaps: list[tuple[float, float]] = field(default_factory=list)


def serve(case: Case, node: Node, requests: Sequence[Arrival]) -> Answers:
    times: StepTimes = node.times
    if case.order == "layers":
        times = node.without_cost_of_parts()
    shape = ClusterShape(
        num_prefill=case.nodes,
        num_decode=1,
        num_routers=1,
        cache_blocks=1,
        decode_kv_tokens=1 << 40,
        steps=times,
        batched=True,
        max_batched_tokens=BUDGET,
        max_sequences=1 << 20,
        make_fill=lambda: order_of(case.order, node),
    )
    kind = StaggeredCluster if case.order == "staggered" else SimCluster
    cluster = kind(shape, _tandem_policy, case.seed)
    ordered = sorted(requests, key=lambda one: one.at_s)
    measured = cluster.run(Traffic(case.group, tuple(ordered)).sim_requests(), 0.0)
    found = {at_s: ttft_s for at_s, ttft_s, _ in measured.answers}
    return Answers([(one, found[one.at_s]) for one in requests], measured.gaps)


def _tandem_policy(registry: NodeRegistry, rng: random.Random) -> Policy:
    return choose_policy(PolicyName.TANDEM, registry, rng, TandemParameters())


def run(case: Case) -> Result:
    node = node_of(case.profile)
    requests = arrivals(case, node)
    answers = serve(case, node, requests)
    seconds = [ttft_s for _, ttft_s in answers.ttft]
    slow = [ttft_s / node.alone_s(one.num_prompt) for one, ttft_s in answers.ttft]
    limits = (max(LEAST_SLO_S, SLO_TIMES * node.alone_s(one.num_prompt)) for one in requests)
    long = [ttft_s for one, ttft_s in answers.ttft if one.num_prompt > 8000]
    figures = {"long_s": _part(long, 0.99) if long else 0.0}
    if case.group == "long":
        figures = _held(case, node, answers)
    if case.nodes == 0:
        (itl_p99,) = weighted_quantiles(answers.gaps, (0.99,))
        total = sum(gap * count for gap, count in answers.gaps)
        mean = total / sum(count for _, count in answers.gaps)
        figures |= {"itl_mean": 1e3 * mean, "itl_p99": 1e3 * itl_p99}
    return Result(
        group=case.group,
        order=case.order,
        profile=case.profile,
        nodes=case.nodes,
        load=case.load,
        ttft_mean=1e3 * statistics.fmean(seconds),
        ttft_p50=1e3 * _part(seconds, 0.5),
        ttft_p99=1e3 * _part(seconds, 0.99),
        slowdown_p50=_part(slow, 0.5),
        slowdown_p99=_part(slow, 0.99),
        in_time=statistics.fmean(s <= limit for s, limit in zip(seconds, limits, strict=True)),
        **figures,
    )


def _held(case: Case, node: Node, without: Answers) -> dict[str, float]:
    """Sends the same requests again, with a long prompt among them."""
    *others, (_, long_s) = serve(case, node, [*(one for one, _ in without.ttft), LONG]).ttft
    pairs = zip(others, without.ttft, strict=True)
    added = [(one, ttft_s - before_s) for (one, ttft_s), (_, before_s) in pairs]
    held = [more / node.alone_s(one.num_prompt) for one, more in added if more > 1e-9]
    return {
        "long_s": long_s,
        "held_p50": _part(held, 0.5),
        "held_p99": _part(held, 0.99),
        "held_twice": sum(more > 2 for more in held) / len(held),
    }


def _part(values: Sequence[float], part: float) -> float:
    return weighted_quantiles([(value, 1.0) for value in values], (part,))[0]


def cases() -> Iterable[Case]:
    for order in ORDERS:
        yield Case(group="equal", order=order, load=0.68)
        for load in (0.7, 0.9):
            yield Case(group="mixed", order=order, load=load)
        for load in (0.5, 0.8):
            yield Case(group="long", order=order, load=load)
    for order in ("arrival, budget 8192", "tandem", "staggered"):
        yield Case(group="cluster", order=order, load=0.68, nodes=3)
    for order in ("arrival, budget 8192", "arrival", "tandem"):
        yield Case(group="experts", order=order, load=0.68, profile=EXPERTS)
    for order in ("arrival, budget 8192", "arrival", "tandem"):
        for load in (0.5, 0.7):
            yield Case(group="undivided", order=order, load=load, nodes=0)


# Output ------------------------------------------------------------------------------------------

_HEAD = (
    "group", "order", "nodes", "load", "TTFT mean", "p50", "p99 ms", "x alone p50", "p99",
    "in time", "long s", "held p50", "p99", "> 2 x", "ITL mean", "p99 ms",
)  # fmt: skip


def row(result: Result) -> str:
    r = result
    figures = (
        f"{r.ttft_mean:.0f}", f"{r.ttft_p50:.0f}", f"{r.ttft_p99:.0f}", f"{r.slowdown_p50:.1f}",
        f"{r.slowdown_p99:.1f}", f"{r.in_time:.3f}", f"{r.long_s:.1f}", f"{r.held_p50:.1f}",
        f"{r.held_p99:.1f}", f"{r.held_twice:.3f}", f"{r.itl_mean:.1f}", f"{r.itl_p99:.1f}",
    )  # fmt: skip
    return "| " + " | ".join((r.group, r.order, str(r.nodes), f"{r.load:g}", *figures)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    groups = list(LENGTHS)
    parser.add_argument(
        "--only", type=names_among(groups), default=groups, help="groups of runs, comma separated"
    )
    only = parser.parse_args().only
    print("| " + " | ".join(_HEAD) + " |", "|---" * len(_HEAD) + "|", sep="\n")
    results = []
    for case in sorted(
        (c for c in cases() if c.group in only), key=lambda c: groups.index(c.group)
    ):
        results.append(run(case))
        print(row(results[-1]), flush=True)
    if set(only) == set(groups):
        print(write_result("prompt_order", [asdict(result) for result in results]))


if __name__ == "__main__":
    main()
