#!/usr/bin/env python3
"""Measures how well requests are placed: the router's own policies on a cluster in virtual time.

Load 1.0 is what the prefill nodes could just compute if no prompt were cached. The workload has
the shape of a published trace (`bench.workload`); time runs faster than in the trace, so that its
traffic loads the cluster.

    python -m bench.router.simulation                       everything, about ten minutes
    python -m bench.router.simulation --only policies,nodes
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from bench.name_lists import names_among
from bench.record import RESULTS, write_result
from bench.router.requests import (
    Limits,
    at_load,
    limits,
    make_requests,
    with_hot_key,
)
from bench.workload import PRESETS
from planner.simulation.cluster import ClusterShape, SimCluster
from planner.simulation.measured import Measured
from planner.simulation.requests import SimRequest
from planner.simulation.step_times import PrefillCost
from router.admission.admission_gate import GateLimits
from router.nodes.registry import NodeRegistry
from router.placement.choose_policy import PolicyName, choose_policy
from router.placement.policy import Policy
from router.placement.spill import Margin, SpillRule
from router.placement.tandem_policy import TandemParameters

SLO_S = 5.0
WARM_PART = 0.15
_TIME_SCALE = 0.38
"""The scale of the pauses between turns: the trace's hour at the load of 16 nodes."""
_TURNS_PER_NODE_S = 0.57
"""Requests that a node gets in a second at load 1, about; exact in `at_load`."""
_HOT_KEY = "hot-key"
_HOT_PART = 0.3
"""The share of all sessions that have the same key in this workload."""
_COST = PrefillCost()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    group: str
    label: str
    load: float
    policy: PolicyName = PolicyName.TANDEM
    workload: str = "conversation"
    count: int = 12_000
    shape: ClusterShape = field(default_factory=ClusterShape)
    parameters: TandemParameters = field(default_factory=TandemParameters)
    slow_nodes: int = 0
    """So many prefill nodes have half the speed."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run's figures. `hit_limit`: that of one endless cache. `work_balance`: busiest node over
    the mean.
    """

    group: str
    label: str
    policy: str
    workload: str
    load: float
    num_prefill: int
    num_routers: int
    slo: float
    """Requests with their first token in time, of all that came."""
    slo_limit: float
    """The same of an idle cluster with one endless cache."""
    refused: float
    hit: float
    hit_limit: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    work_balance: float
    decision_p50_us: float
    decision_mean_us: float
    decode_overfull: int
    choices: dict[str, int]
    wall_s: float


@cache
def _requests(
    workload: str, num_nodes: int, load: float, count: int, seed: int
) -> tuple[list[SimRequest], Limits]:
    preset = PRESETS["conversation" if workload == _HOT_KEY else workload]
    preset = preset.scaled(1.0, _TIME_SCALE, None)
    requests = make_requests(preset, _TURNS_PER_NODE_S * load * num_nodes, count, seed)
    if workload == _HOT_KEY:
        requests = with_hot_key(requests, _HOT_PART)
    requests = at_load(
        requests, load * num_nodes, lambda r: _COST.seconds(r.num_prompt, r.num_prompt)
    )
    return requests, limits(requests, int(WARM_PART * count), _COST.seconds, SLO_S)


def run(case: Case) -> Result:
    requests, limit = _requests(
        case.workload, case.shape.num_prefill, case.load, case.count, case.seed
    )
    began = time.perf_counter()
    cluster = SimCluster(case.shape, _maker(case), case.seed, [0.5] * case.slow_nodes)
    measured = cluster.run(requests, WARM_PART)
    return _result(case, cluster, measured, limit, time.perf_counter() - began)


def _maker(case: Case) -> Callable[[NodeRegistry, random.Random], Policy]:
    return lambda registry, rng: choose_policy(case.policy, registry, rng, case.parameters)


def _result(
    case: Case, cluster: SimCluster, measured: Measured, limit: Limits, wall_s: float
) -> Result:
    ttft = sorted(measured.ttft_s)
    busy = [node.engine.busy_s for node in cluster.prefills]
    decisions = sorted(measured.decision_s)
    return Result(
        group=case.group,
        label=case.label,
        policy=case.policy,
        workload=case.workload,
        load=case.load,
        num_prefill=case.shape.num_prefill,
        num_routers=case.shape.num_routers,
        slo=sum(t < SLO_S for t in ttft) / (len(ttft) + measured.num_refused),
        slo_limit=limit.slo,
        refused=measured.num_refused / (len(ttft) + measured.num_refused),
        hit=measured.num_cached / measured.num_prompt,
        hit_limit=limit.hit,
        ttft_mean_s=statistics.fmean(ttft),
        ttft_p50_s=statistics.median(ttft),
        ttft_p99_s=ttft[int(0.99 * len(ttft))],
        work_balance=max(busy) / statistics.fmean(busy),
        decision_p50_us=1e6 * statistics.median(decisions),
        decision_mean_us=1e6 * statistics.fmean(decisions[: int(0.99 * len(decisions))]),
        decode_overfull=measured.num_overfull,
        choices=dict(measured.choices),
        wall_s=wall_s,
    )


# What is compared -------------------------------------------------------------------------------


def policies() -> Iterable[Case]:
    for load in (0.6, 0.95, 1.15, 1.3):
        for policy in PolicyName:
            yield Case(group="policies", label=policy, load=load, policy=policy)


def seeds() -> Iterable[Case]:
    for seed in (1, 2):
        for load in (0.95, 1.15):
            yield Case(group="seeds", label=f"seed {seed}", load=load, seed=seed)


def routers() -> Iterable[Case]:
    for num_routers in (1, 2, 8, 16):
        for load in (0.95, 1.15):
            shape = ClusterShape(num_routers=num_routers)
            yield Case(group="routers", label=f"{num_routers} routers", load=load, shape=shape)


def reports() -> Iterable[Case]:
    """Compares intervals between reports, without the report that follows each change."""
    for report_s in (0.25, 0.5, 1.0, 2.0):
        for load in (0.95, 1.15):
            shape = ClusterShape(report_s=report_s, reports_on_change=False)
            yield Case(group="reports", label=f"every {report_s:g} s", load=load, shape=shape)


def nodes() -> Iterable[Case]:
    for num_prefill, count in ((64, 24_000), (256, 40_000), (1000, 60_000)):
        shape = ClusterShape(
            num_prefill=num_prefill,
            num_decode=num_prefill // 2,
            report_s=1.0 if num_prefill > 256 else 0.25,
        )
        for policy in (PolicyName.LEAST_LOADED, PolicyName.TANDEM):
            yield Case(
                group="nodes", label=policy, load=0.95, policy=policy, count=count, shape=shape
            )


def workloads() -> Iterable[Case]:
    for workload in ("agent", "chat-short", "no-share", "hot-prefix", "flash-crowd", _HOT_KEY):
        for policy in (PolicyName.LEAST_LOADED, PolicyName.STICKY, PolicyName.TANDEM):
            yield Case(group="workloads", label=policy, load=0.9, policy=policy, workload=workload)


def parts() -> Iterable[Case]:
    """Compares the policy with one of its parts taken away."""
    base = TandemParameters()
    none, double = Margin(0.0, 0.0), Margin(1.0, 1.0)
    variants: list[tuple[str, TandemParameters, ClusterShape]] = [
        ("complete", base, ClusterShape()),
        ("no margins", replace(base, spill=SpillRule(none, none)), ClusterShape()),
        ("double margins", replace(base, spill=SpillRule(double, double)), ClusterShape()),
        ("constant weight 3", replace(base, base_weight=3.0, queue_weight=0.0), ClusterShape()),
        ("no prefix index", replace(base, max_index_entries=0), ClusterShape()),
        ("no prefixes in reports", base, ClusterShape(reports_prefixes=False)),
    ]
    for label, parameters, shape in variants:
        for load in (0.95, 1.15):
            yield Case(group="parts", label=label, load=load, shape=shape, parameters=parameters)


def slow() -> Iterable[Case]:
    for policy in (PolicyName.LEAST_LOADED, PolicyName.STICKY, PolicyName.TANDEM):
        yield Case(group="slow", label=policy, load=0.8, policy=policy, slow_nodes=2)


def overload() -> Iterable[Case]:
    """Sends far more than can be served, without and with admission."""
    gate = GateLimits(slots_per_node=4, max_waiting=64, num_routers=4)
    for load in (1.15, 1.5, 2.0, 3.0):
        for label, admission in (("all admitted", None), ("gate", gate)):
            shape = ClusterShape(gate=admission, deadline_s=SLO_S if admission else 0.0)
            yield Case(group="overload", label=label, load=load, shape=shape)


GROUPS: dict[str, Callable[[], Iterable[Case]]] = {
    group.__name__: group
    for group in (policies, seeds, routers, reports, nodes, workloads, parts, slow, overload)
}


# The cost of a decision --------------------------------------------------------------------------


def decision_us(num_prefill: int, count: int = 4000) -> float:
    """Returns the processor time of one decision, after a router has placed as many before."""
    shape = ClusterShape(num_prefill=num_prefill, num_decode=num_prefill // 2, num_routers=1)
    requests, _ = _requests("conversation", num_prefill, 0.95, 2 * count, 0)
    cluster = SimCluster(shape, _maker(Case(group="", label="", load=0.95)), 0)
    cluster.run(requests[:count])
    place = cluster.routers[0].policy.place
    began = time.process_time()
    for request in requests[count:]:
        place(request.info)
    return 1e6 * (time.process_time() - began) / count


# Output -----------------------------------------------------------------------------------------

_HEAD = (
    "group", "case", "workload", "nodes", "load", "SLO", "refused", "hits / limit", "TTFT mean",
    "p99",
)  # fmt: skip


def table(results: Iterable[Result]) -> str:
    rows = [_HEAD, ("---",) * len(_HEAD)]
    for r in results:
        hits = f"{r.hit:.3f} / {r.hit_limit:.3f}"
        figures = (
            f"{r.slo:.3f}",
            f"{r.refused:.3f}",
            hits,
            f"{r.ttft_mean_s:.2f}",
            f"{r.ttft_p99_s:.1f}",
        )
        rows.append((r.group, r.label, r.workload, str(r.num_prefill), f"{r.load:g}", *figures))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _last_figures() -> dict[str, Any]:
    path = RESULTS / "routing_sim.json"
    if not path.exists():
        return {"decision_us": {}, "runs": []}
    figures: dict[str, Any] = json.loads(path.read_text())["figures"]
    return figures


def keep(group: str, results: Sequence[Result]) -> None:
    """Keeps runs in the result file, in place of the group's last runs. Equal code gives equal
    runs.
    """
    figures = _last_figures()
    others = [run for run in figures["runs"] if run["group"] != group]
    figures["runs"] = [*others, *(asdict(result) for result in results)]
    write_result("routing_sim", figures)


def keep_decisions(decisions: Mapping[int, float]) -> None:
    figures = _last_figures()
    figures["decision_us"] = {str(count): us for count, us in decisions.items()}
    write_result("routing_sim", figures)


def plot(runs: Sequence[Mapping[str, Any]], decisions: Mapping[str, float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4))
    for policy in PolicyName:
        mine = [r for r in runs if r["group"] == "policies" and r["label"] == policy]
        loads = [r["load"] for r in mine]
        left.plot(loads, [r["slo"] for r in mine], marker="o", label=policy)
        middle.plot(loads, [r["hit"] / r["hit_limit"] for r in mine], marker="o", label=policy)
    left.set(xlabel="load", ylabel=f"requests with TTFT < {SLO_S:g} s", ylim=(0, 1))
    middle.set(xlabel="load", ylabel="prefix hits, of an endless cache's", ylim=(0, 1.05))
    right.plot(list(map(int, decisions)), list(decisions.values()), marker="o")
    right.set(xlabel="prefill nodes", ylabel="µs of processor time for a decision", xscale="log")
    right.set_ylim(bottom=0)
    left.legend()
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(RESULTS / "routing_sim.png", dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only",
        type=names_among(GROUPS),
        default=list(GROUPS),
        help="groups of runs, comma separated; others keep their last result",
    )
    parser.add_argument("--part", type=float, default=1.0, help="of the requests; for a first look")
    args = parser.parse_args()
    for name in args.only:
        results = []
        for case in GROUPS[name]():
            result = run(replace(case, count=int(case.count * args.part)))
            results.append(result)
            print(table([result]).splitlines()[-1], f"{result.decision_p50_us:.0f} µs", flush=True)
        if args.part == 1.0:
            keep(name, results)
    decisions = {count: decision_us(count) for count in (16, 64, 256, 1000)}
    print("µs of processor time for a decision, by prefill nodes:", decisions)
    if args.part == 1.0:
        keep_decisions(decisions)
        figures = _last_figures()
        plot(figures["runs"], figures["decision_us"])


if __name__ == "__main__":
    main()
