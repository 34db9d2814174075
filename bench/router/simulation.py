#!/usr/bin/env python3
"""Measures how well requests are placed: the router's own policies on a cluster in virtual time.

Load 1.0 is what the prefill nodes could just compute if no prompt were cached. The workload has
the shape of a published trace (`bench.workload`); time runs faster than in the trace, so that its
traffic loads the cluster.

    python -m bench.router.simulation                       everything, about ten minutes
    python -m bench.router.simulation --only policies,nodes
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from bench.arguments import names_among, parser_of
from bench.figures import markdown
from bench.record import RESULTS, write_result
from bench.router.simulated_case import HOT_KEY, SLO_S, Case, Result, policy_maker, requests_of, run
from planner.shipped_profiles import shipped_profile
from planner.simulation.cluster import ClusterShape, SimCluster
from planner.simulation.step_filling import prompt_order
from planner.simulation.step_times import MeasuredTimes, PrefillCost
from router.admission.admission_gate import GateLimits
from router.placement.choose_policy import PolicyName

_BUDGET = 8192
_COMPARED = (PolicyName.LEAST_LOADED, PolicyName.TANDEM)

# What is compared -------------------------------------------------------------------------------


def _cases(
    group: str, label: str, shape: ClusterShape | None = None, **lists: Iterable[Any]
) -> Iterable[Case]:
    """Yields a case for each combination of values of fields, the last list's first. `label` may
    name them."""
    for values in product(*lists.values()):
        fields = dict(zip(lists, values, strict=True))
        name = label.format(**fields)
        yield Case(group=group, label=name, shape=shape or ClusterShape(), **fields)


def policies() -> Iterable[Case]:
    yield from _cases("policies", "{policy}", load=(0.6, 0.95, 1.15, 1.3), policy=PolicyName)


def routers() -> Iterable[Case]:
    for count in (1, 2, 8, 16):
        shape = ClusterShape(num_routers=count)
        yield from _cases("routers", f"{count} routers", shape, load=(0.95, 1.15))


def nodes() -> Iterable[Case]:
    for num_prefill, count in ((64, 24_000), (256, 40_000), (1000, 60_000)):
        shape = ClusterShape(
            num_prefill=num_prefill,
            num_decode=num_prefill // 2,
            report_s=1.0 if num_prefill > 256 else 0.25,
        )
        yield from _cases("nodes", "{policy}", shape, load=[0.95], policy=_COMPARED, count=[count])


def workloads() -> Iterable[Case]:
    names = "agent", "chat-short", "no-share", "hot-prefix", "flash-crowd", HOT_KEY
    some = PolicyName.LEAST_LOADED, PolicyName.STICKY, PolicyName.TANDEM
    yield from _cases("workloads", "{policy}", load=[0.9], workload=names, policy=some)


def uncached() -> Iterable[Case]:
    """Sends prompts of which no node has anything: then no policy should beat the least load."""
    for num_prefill, num_routers in product((2, 3, 8, 16, 32), (1, 4)):
        shape = ClusterShape(
            num_prefill=num_prefill, num_decode=num_prefill, num_routers=num_routers
        )
        yield from _uncached(f"{num_routers} routers", (0.3, 0.6, 0.9), shape)
    few = ClusterShape(num_prefill=8, num_decode=8)
    late = replace(few, report_s=1.0, reports_on_change=False)
    for load in (0.6, 0.9):
        yield from _uncached("reports each 1 s", [load], late)
        yield from _uncached("2 of half the speed", [load], few, slow_nodes=[2])


def _uncached(
    label: str, loads: Iterable[float], shape: ClusterShape, **lists: Iterable[int]
) -> Iterable[Case]:
    lengths = "equal", "mixed"
    yield from _cases(
        "uncached", f"{{policy}}, {label}", shape,
        load=loads, workload=lengths, policy=_COMPARED, count=[6000], **lists,
    )  # fmt: skip


def rates() -> Iterable[Case]:
    """Sends what was sent to four GPUs (docs/performance.md), with the steps of Llama-3.1-8B."""
    for policy in (PolicyName.ROUND_ROBIN, *_COMPARED):
        yield from _at_rates("rates", policy, policy)


def _of_h200s(num_prefill: int, num_decode: int, itl_objective_s: float) -> ClusterShape:
    """Returns a cluster with one router and the steps of Llama-3.1-8B on H200s."""
    steps = MeasuredTimes(shipped_profile("h200-llama-3.1-8b"))
    return ClusterShape(
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_routers=1,
        steps=steps,
        batched=True,
        make_fill=partial(prompt_order, steps, _BUDGET),
        max_batched_tokens=_BUDGET,
        itl_objective_s=itl_objective_s,
    )


def deflected() -> Iterable[Case]:
    """Lets decode nodes compute prompts in the room of their steps, with objectives of theirs."""
    for objective_ms in (0, 15, 20, 30, 50):
        label = f"ITL objective {objective_ms} ms" if objective_ms else "never"
        yield from _at_rates("deflected", label, PolicyName.TANDEM, objective_ms / 1000)


def _at_rates(
    group: str, label: str, policy: PolicyName, itl_objective_s: float = 0.0
) -> Iterable[Case]:
    for workload, num_prefill, num_decode, sent in (
        ("equal", 3, 1, (24, 48, 55, 60, 65)),
        ("1000-300", 2, 2, (30, 60, 70, 80)),
    ):
        shape = _of_h200s(num_prefill, num_decode, itl_objective_s)
        yield from _cases(
            group, f"{label}, {{rate}}/s", shape,
            load=[0.0], rate=sent, policy=[policy], workload=[workload], count=[4000],
        )  # fmt: skip


def batches() -> Iterable[Case]:
    """Compares the same requests alone and beside a batch on capacity that nothing else uses."""
    for objective_ms, (num_prefill, num_decode) in product((0, 15), ((1, 1), (4, 4), (16, 8))):
        shape = replace(
            _of_h200s(num_prefill, num_decode, objective_ms / 1000), reports_always=True
        )
        name = f"{num_prefill}P{num_decode}D, ITL objective {objective_ms} ms"
        for one in _cases(
            "batches", name, shape,
            load=(0.1, 0.3, 0.6, 0.9), workload=["equal"], count=[4000], beside_batch=(False, True),
        ):  # fmt: skip
            yield replace(one, label=f"{name}, beside a batch") if one.beside_batch else one


def overload() -> Iterable[Case]:
    """Sends far more than can be served, without and with admission."""
    gate = GateLimits(slots_per_node=4, max_waiting=64, num_routers=4)
    gated = ClusterShape(gate=gate, deadline_s=SLO_S)
    for load in (1.15, 1.5, 2.0, 3.0):
        yield Case(group="overload", label="all admitted", load=load)
        yield Case(group="overload", label="gate", load=load, shape=gated)


# fmt: off
GROUPS: dict[str, Callable[[], Iterable[Case]]] = {
    group.__name__: group
    for group in (
        policies, routers, nodes, workloads, overload, uncached, rates, deflected, batches,
    )
}
# fmt: on


_DECISIONS = "decisions"

# The cost of a decision --------------------------------------------------------------------------


def decision_us(num_prefill: int, count: int = 4000) -> float:
    """Returns the processor time of one decision, after a router has placed as many before."""
    shape = ClusterShape(num_prefill=num_prefill, num_decode=num_prefill // 2, num_routers=1)
    requests, _ = requests_of("conversation", num_prefill, 0.95, 2 * count, 0, PrefillCost())
    cluster = SimCluster(shape, policy_maker(Case(group="", label="", load=0.95)), 0)
    cluster.run(requests[:count])
    cluster.reports.now()
    place = cluster.routers[0].policy.place
    began = time.process_time()
    for request in requests[count:]:
        place(request.info)
    return 1e6 * (time.process_time() - began) / count


# Output -----------------------------------------------------------------------------------------

_HEAD = (
    "group, case, workload, nodes, load, SLO, refused, hits / limit, TTFT mean, p50, p99, "
    "ideal mean, p99, ITL p99"
)
_SECONDS = "ttft_mean", "ttft_p50", "ttft_p99", "ideal_mean", "ideal_p99", "itl_p99"


def cells(r: Result) -> list[str]:
    """Returns a row of the table below `_HEAD`."""
    case = [r["group"], r["label"], r["workload"], str(r["num_prefill"]), f"{r['load']:g}"]
    hits = f"{r['hit']:.3f} / {r['hit_limit']:.3f}"
    seconds = (f"{r[f'{name}_s']:.3g}" for name in _SECONDS)
    return [*case, f"{r['slo']:.3f}", f"{r['refused']:.3f}", hits, *seconds]


def keep(group: str, results: Sequence[Result], decision_us: Mapping[int, float]) -> None:
    """Keeps runs in the result file, in place of the group's last runs, and what decisions took
    where that was measured. Equal code gives equal runs."""
    figures = json.loads((RESULTS / "routing_sim.json").read_text())["figures"]
    others = [run for run in figures["runs"] if run["group"] != group]
    figures |= {"runs": [*others, *results]}
    figures["decision_us"] |= {str(count): us for count, us in decision_us.items()}
    write_result("routing_sim", figures)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--only",
        type=names_among([*GROUPS, _DECISIONS]),
        default=[*GROUPS, _DECISIONS],
        help="groups of runs, comma separated; others keep their last result",
    )
    parser.add_argument("--part", type=float, default=1.0, help="of the requests; for a first look")
    args = parser.parse_args()
    is_whole = args.part == 1.0
    for name in args.only:
        results, decisions = [], {}
        if name == _DECISIONS:
            decisions = {count: decision_us(count) for count in (16, 64, 256, 1000)}
            print("µs of processor time for a decision, by prefill nodes:", decisions)
        for case in GROUPS[name]() if name in GROUPS else ():
            result = run(replace(case, count=int(case.count * args.part)))
            results.append(result)
            us = f"{result['decision_p50_us']:.0f} µs"
            print(markdown(_HEAD, [cells(result)]).splitlines()[-1], us, flush=True)
        if is_whole:
            keep(name, results, decisions)


if __name__ == "__main__":
    main()
