#!/usr/bin/env python3
"""Compares what `tandem plan` predicts with what was measured on clusters of GPUs.

The simulation gets the profile of the engine (`bench.engine.speed`, one GPU, no server) and the
arrivals of the measured run (`bench.serving.load` makes them from its seed). Nothing is fitted to
the clusters' figures but `overhead_s`, one constant for all.

    python -m bench.router.plan_accuracy

Writes bench/results/plan_accuracy.json.

    python -m bench.router.plan_accuracy --live goodput-3p1d goodput-2p2d

shows results of `bench.serving.goodput` instead, each of which was simulated again with the step
times of its own nodes: what is left is what the model of queues, routers and joins does not have.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

from bench.arguments import parser_of
from bench.figures import markdown
from bench.record import RESULTS, write_result
from bench.serving.load import LoadSpec
from planner.evaluation import Evaluator, Forecast, Nodes, Objectives
from planner.shipped_profiles import shipped_profile
from planner.traffic.traffic import Arrival, Traffic

MEASURED = {
    "pd_serving": "h200-llama-3.1-8b",
    "pd_serving_ratio": "h200-llama-3.1-8b",
    "pd_qwen3_30b": "h200-qwen3-30b-a3b",
}
FIGURES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
ALLOWED = {"p50": 0.15, "p99": 0.30}
"""How far live figures may be from simulated ones."""
_ENGINE = re.compile(r"tandem-(\d+)p(\d+)d")


def nodes_of(engine: str) -> Nodes | None:
    """Returns the nodes of a measured cluster; None for one that is not compared."""
    found = _ENGINE.fullmatch(engine)
    return Nodes(int(found[1]), int(found[2])) if found else None


def arrivals(settings: dict[str, Any], load: dict[str, Any], index: int) -> Traffic:
    """Returns the arrivals of the measured run at its `index`-th rate."""
    spec = LoadSpec(
        urls=[""],
        model="",
        n_in=load["n_in"],
        n_out=load["n_out"],
        rate=load["qps"],
        duration_s=settings["duration"],
        drain_s=0.0,
        seed=settings["seed"] + 1000 * index,
        vocabulary=(0, 1),
    )
    found = (Arrival(one.start_s, spec.n_in, spec.n_out) for one in spec.sessions())
    return Traffic("measured", tuple(found))


def compare(name: str) -> Iterator[dict[str, Any]]:
    figures = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
    profile = shipped_profile(MEASURED[name])
    for engine, loads in groupby(figures["loads"], key=itemgetter("engine")):
        if (nodes := nodes_of(engine)) is None:
            continue
        for index, load in enumerate(loads):
            traffic = arrivals(figures["settings"], load, index)
            evaluator = Evaluator(profile, traffic, Objectives(1.0, 0.05), warm_part=0.0)
            evaluator.prompt_order = "arrival"  # The nodes of these runs had no other.
            outcome = evaluator.outcome(nodes)
            row: dict[str, Any] = {
                "source": name,
                "nodes": str(nodes),
                "rate": load["qps"],
                "requests": load["sent"],
                "simulated_requests": len(traffic.arrivals),
            }
            yield row | {figure: prediction(outcome, load, figure) for figure in FIGURES}


def prediction(outcome: Forecast, load: dict[str, Any], figure: str) -> dict[str, float]:
    kind, part = figure.split("_")
    field = f"{kind}_p50_s" if part == "p50" else f"{kind}_tail_s"
    measured, predicted = load[f"{kind}_ms"][part], 1e3 * getattr(outcome, field)
    return {
        "measured_ms": round(measured, 2),
        "predicted_ms": round(predicted, 2),
        "error": round(predicted / measured - 1, 3),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median and largest absolute error of each figure."""
    found = {}
    for figure in FIGURES:
        errors = [abs(row[figure]["error"]) for row in rows]
        found[figure] = {"median": statistics.median(errors), "largest": max(errors)}
    return found


def table(rows: list[dict[str, Any]]) -> str:
    found = []
    for row in rows:
        cells = [
            f"{row[f]['predicted_ms']:.4g} / {row[f]['measured_ms']:.4g} ({row[f]['error']:+.0%})"
            for f in FIGURES
        ]
        found.append([row["nodes"], f"{row['rate']:g}", *cells])
    return markdown("nodes, requests/s, TTFT p50 ms, p99, ITL p50 ms, p99", found)


def live_table(rows: list[dict[str, Any]]) -> str:
    """Returns live and simulated milliseconds, with a star where they are further apart than
    `ALLOWED`; the ideal is one queue before as many servers."""
    found = []
    for row in rows:
        ttft_p50, ttft_p99, *itl = (live_cell(row, name) for name in FIGURES)
        ideal = "{p50:.4g}/{p99:.4g}".format(**row["simulated"]["ideal_ttft_ms"])
        load = f"{row['n_in']}/{row['n_out']}", f"{row['qps']:g}"
        found.append([row["engine"], *load, ttft_p50, ttft_p99, ideal, *itl])
    head = "nodes, in/out, requests/s, TTFT p50 ms, p99, ideal p50/p99, ITL p50 ms, p99"
    return markdown(head, found)


def live_cell(row: dict[str, Any], figure: str) -> str:
    kind, part = figure.split("_")
    live, simulated = row[f"{kind}_ms"][part], row["simulated"][f"{figure}_ms"]
    ratio = live / simulated
    star = "*" if abs(ratio - 1) > ALLOWED[part] else ""
    return f"{live:.4g} / {simulated:.4g} ({ratio:.2f}){star}"


def live_rows(names: list[str]) -> list[dict[str, Any]]:
    """Reads the rows that were simulated. Raises OSError."""
    found = []
    for name in names:
        loads = json.loads((RESULTS / f"{name}.json").read_text())["figures"]["loads"]
        found += [row for row in loads if "simulated" in row]
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--live", nargs="+", metavar="NAME", help="results in bench/results")
    args = parser.parse_args()
    if args.live:
        print(live_table(live_rows(args.live)))
        return
    rows = [row for name in MEASURED for row in compare(name)]
    print(table(rows))
    print(json.dumps(summary(rows), indent=1))
    print(write_result("plan_accuracy", {"rows": rows, "absolute_error": summary(rows)}))


if __name__ == "__main__":
    main()
