#!/usr/bin/env python3
"""GPU-hours of autoscaled tiers at the same objectives: the routers' signal against a reactive HPA.

The cluster is simulated with the router's own code (`planner.simulation`); its nodes have the speed
of the shipped profile of Llama-3.1-8B on one H200, and take `START_S` to start. Every 15 s the
HorizontalPodAutoscaler of each tier (`bench.router.hpa`) reads its metric:

    slo          what the routers say (`router.scaling`); swept: the window before scaling down
    busy         busy prefill nodes; running sequences of those that a decode node may have;
                 Kubernetes' default behaviour; swept: the target
    backlog      the chart's default: seconds of queued prompts, and KV in use, with its slow
                 behaviour; swept: the target

    python -m bench.router.autoscaling                    about ten minutes
    python -m bench.router.autoscaling --only step --part 0.3

Three traces of an hour: bursts, a day (shrunk), a step. Writes bench/results/autoscaling.json.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from bench.arguments import names_among, parser_of
from bench.engine.speed_profiles import PROFILES
from bench.figures import percentile
from bench.record import RESULTS, write_result
from bench.router.elastic_cluster import ElasticCluster
from bench.router.hpa import DEFAULT_DOWN, DEFAULT_UP, SYNC_S, Hpa, Rules, ScalingPolicy
from engine.speed.profile import load_profile
from planner.evaluation import Evaluator, Objectives
from planner.simulation.cluster import ClusterShape
from planner.traffic.described import read_lengths
from planner.traffic.traffic import Arrival, Traffic
from router.nodes.address import NodeRole
from router.placement.tandem_policy import TandemParameters, TandemPolicy
from router.scaling.scaling_signal import ScalingObjectives

PROFILE = load_profile(Path(PROFILES) / "h200-llama-3.1-8b.json")
OBJECTIVES = Objectives(4.0, 0.05)
START_S = 120.0
HOUR_S = 3600.0
_PROMPT, _OUTPUT = read_lengths("16000~0.5"), read_lengths("300~0.7")
_MOST = 24
_CHART_UP = Rules(0.0, (ScalingPolicy("Pods", 1, 60.0),))


# Traces -----------------------------------------------------------------------------------------


def bursts(rng: random.Random) -> Callable[[float], float]:
    """Two requests a second, and every seven minutes or so 6 to 10 for one to three minutes."""
    found, now = [], 300.0
    while now < HOUR_S:
        length_s = rng.uniform(60, 180)
        found.append((now, now + length_s, rng.uniform(6, 10)))
        now += length_s + rng.expovariate(1 / 300)

    def rate(at_s: float) -> float:
        return next((high for begin, end, high in found if begin <= at_s < end), 2.0)

    return rate


def day(rng: random.Random) -> Callable[[float], float]:
    """Returns 1 to 8 requests a second, as a sine of an hour."""
    return lambda at_s: 4.5 - 3.5 * math.cos(2 * math.pi * at_s / HOUR_S)


def step(rng: random.Random) -> Callable[[float], float]:
    """Two requests a second, 8 for the second third."""
    return lambda at_s: 8.0 if HOUR_S / 3 <= at_s < 2 * HOUR_S / 3 else 2.0


TRACES: dict[str, Callable[[random.Random], Callable[[float], float]]] = {
    "bursts": bursts,
    "day": day,
    "step": step,
}


def make_traffic(name: str, part: float = 1.0, seed: int = 1) -> Traffic:
    """Returns Poisson arrivals at the trace's rate; the first `part` of them."""
    rng = random.Random(f"{name} {seed}")
    rate = TRACES[name](rng)
    highest = max(rate(at) for at in range(int(HOUR_S)))
    arrivals, now = [], 0.0
    while True:
        now += rng.expovariate(highest)
        if now >= HOUR_S * part:
            label = name if seed == 1 else f"{name}, seed {seed}"
            return Traffic(label, tuple(arrivals))
        if rng.random() < rate(now) / highest:
            arrivals.append(Arrival(now, _PROMPT.draw(rng), _OUTPUT.draw(rng)))


# Scalers ----------------------------------------------------------------------------------------

Metric = Callable[[ElasticCluster, NodeRole], float | None]


@dataclass(frozen=True, slots=True)
class Scaler:
    """Is a way to scale both tiers, with one of its settings."""

    kind: str
    setting: float
    metric: Callable[[], Metric]
    prefill_target: float
    decode_target: float
    up: Rules
    down: Rules


def _slo_metric() -> Metric:
    def read(cluster: ElasticCluster, role: NodeRole) -> float | None:
        shares = [signal.desired(role) for signal in cluster.signals.values()]
        known = [share for share in shares if share is not None]
        return sum(known) if len(known) == len(shares) else None

    return read


def _busy_metric() -> Metric:
    """Returns busy prefill nodes, and sequences, as means since the last reading."""
    last: dict[NodeRole, tuple[float, float]] = {}

    def read(cluster: ElasticCluster, role: NodeRole) -> float | None:
        engines = [node.engine for node in cluster.nodes_of(role)]
        now = cluster.timeline.now
        if role is NodeRole.PREFILL:
            total = sum(engine.busy_s for engine in engines)
        else:
            total = sum(engine.sequence_s for engine in engines)
        then, before = last.get(role, (now - SYNC_S, total))
        last[role] = now, total
        return max(0.0, total - before) / (now - then)

    return read


def _backlog_metric() -> Metric:
    def read(cluster: ElasticCluster, role: NodeRole) -> float | None:
        if role is NodeRole.PREFILL:
            speed = cluster.prompt_tokens_per_s
            return sum(node.num_waiting_tokens for node in cluster.prefills) / speed
        return sum(node.used_tokens / node.kv_tokens for node in cluster.decodes)

    return read


def scalers() -> Iterator[Scaler]:
    batch = _batch_limit()
    for window_s in (120.0, 300.0, 600.0, 1200.0):
        down = Rules(window_s, (ScalingPolicy("Percent", 50, 60.0),))
        yield Scaler("slo", window_s, _slo_metric, 1, 1, DEFAULT_UP, down)
    for part in (0.2, 0.35, 0.5, 0.7):
        yield Scaler("busy", part, _busy_metric, part, part * batch, DEFAULT_UP, DEFAULT_DOWN)
    slow = Rules(300.0, (ScalingPolicy("Pods", 1, 300.0),))
    for seconds in (0.3, 1.5):
        kv = min(0.8, 0.4 + 0.4 * seconds)
        yield Scaler("backlog", seconds, _backlog_metric, seconds, kv, _CHART_UP, slow)


def _batch_limit() -> int:
    return Evaluator(PROFILE, make_traffic("step", 0.1), OBJECTIVES).batch_limit()


# Runs -------------------------------------------------------------------------------------------


Run = dict[str, Any]
"""Holds what one scaler made of one trace."""


class _Autoscaled(ElasticCluster):
    prompt_tokens_per_s = 1.0


def run(scaler: Scaler, traffic: Traffic) -> Run:
    """Returns figures; `attained`: the share of requests whose TTFT and mean time between tokens
    were within the objectives."""
    began = time.perf_counter()
    evaluator = Evaluator(PROFILE, traffic, OBJECTIVES)
    speed = evaluator.times.tokens_per_s(round(traffic.mean_prompt))
    shape = ClusterShape(
        num_prefill=2,
        num_decode=1,
        num_routers=1,
        report_s=1.0,
        reports_on_change=False,
        cache_blocks=PROFILE.kv_tokens // 512,
        decode_kv_tokens=PROFILE.kv_tokens,
        steps=evaluator.times,
        batched=True,
        overhead_s=PROFILE.overhead_s,
    )
    parameters = TandemParameters(prefill_tokens_per_s=speed)
    objectives = ScalingObjectives(OBJECTIVES.ttft_s, OBJECTIVES.itl_s)
    make_policy = partial(TandemPolicy, parameters=parameters)
    cluster = _Autoscaled(shape, make_policy, 1, objectives, START_S)
    cluster.prompt_tokens_per_s = speed
    log = _autoscale(cluster, scaler)
    measured = cluster.run(traffic.sim_requests(), 0.0)
    hours = {role: cluster.gpu_s(role) / 3600 for role in NodeRole}
    good = sum(
        ttft <= OBJECTIVES.ttft_s and gap <= OBJECTIVES.itl_s for _, ttft, gap in measured.answers
    )
    return {
        "trace": traffic.name,
        "scaler": scaler.kind,
        "setting": scaler.setting,
        "requests": len(traffic.arrivals),
        "attained": good / len(traffic.arrivals),
        "ttft_p99_s": percentile(measured.ttft_s, 0.99),
        "gpu_hours": sum(hours.values()),
        "prefill_hours": hours[NodeRole.PREFILL],
        "decode_hours": hours[NodeRole.DECODE],
        "most_prefill": max(counts[NodeRole.PREFILL] for counts in log),
        "most_decode": max(counts[NodeRole.DECODE] for counts in log),
        "changes": sum(a != b for a, b in pairwise(log)),
        "wall_s": time.perf_counter() - began,
    }


def _autoscale(cluster: ElasticCluster, scaler: Scaler) -> list[dict[NodeRole, int]]:
    """Lets both tiers be scaled; returns the list that their sizes are written to."""
    targets = {NodeRole.PREFILL: scaler.prefill_target, NodeRole.DECODE: scaler.decode_target}
    hpas = {
        role: Hpa(target=target, max_replicas=_MOST, up=scaler.up, down=scaler.down)
        for role, target in targets.items()
    }
    metric = scaler.metric()
    log = [{role: cluster.size(role) for role in NodeRole}]

    def sync() -> None:
        for role, hpa in hpas.items():
            total = metric(cluster, role)
            wanted = hpa.decide(cluster.timeline.now, cluster.size(role), total)
            cluster.resize(role, wanted)
        log.append({role: cluster.size(role) for role in NodeRole})
        cluster.timeline.at(cluster.timeline.now + SYNC_S, sync)

    cluster.timeline.at(SYNC_S, sync)
    return log


def compare(runs: list[Run]) -> list[dict[str, object]]:
    """Returns, for each trace and setting of the signal, what each other scaler would cost at the
    same attainment, and what the signal saves; None where no setting of it attains as much."""
    found = []
    for ours in (run for run in runs if run["scaler"] == "slo"):
        row = {name: ours[name] for name in ("trace", "setting", "attained", "gpu_hours")}
        for kind in ("busy", "backlog"):
            theirs = [r for r in runs if (r["trace"], r["scaler"]) == (ours["trace"], kind)]
            hours = hours_at(ours["attained"], theirs)
            row[kind] = hours and {"gpu_hours": hours, "saved": 1 - ours["gpu_hours"] / hours}
        found.append(row)
    return found


def hours_at(attained: float, runs: list[Run]) -> float | None:
    """Returns the fewest GPU-hours at which one of `runs`, or a setting between two of them, would
    attain this much; None if none does. Between two settings both figures are interpolated, which
    favours their scaler when it is convex."""
    points = [(run["attained"], run["gpu_hours"]) for run in runs]
    enough = [hours for part, hours in points if part >= attained]
    for (low, low_h), (high, high_h) in product(points, points):
        if low < attained <= high:
            enough.append(low_h + (high_h - low_h) * (attained - low) / (high - low))
    return min(enough, default=None)


def keep(runs: list[Run]) -> None:
    """Keeps runs in the result file, in place of the last ones of the same trace and scaler."""
    path = RESULTS / "autoscaling.json"
    old = json.loads(path.read_text())["figures"]["runs"] if path.exists() else []
    mine = {(run["trace"], run["scaler"]) for run in runs}
    both = [*(run for run in old if (run["trace"], run["scaler"]) not in mine), *runs]
    figures = {"start_s": START_S, "objectives": asdict(OBJECTIVES), "runs": both}
    print(write_result("autoscaling", {**figures, "comparison": compare(both)}))


_ROW = (
    "| {trace} | {scaler} {setting:g} | {attained:.1%} | {ttft_p99_s:.1f} | {gpu_hours:.2f} "
    "| {prefill_hours:.2f} + {decode_hours:.2f} | {most_prefill}P {most_decode}D | {changes} |"
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", type=names_among(TRACES), default=list(TRACES), help="traces")
    parser.add_argument("--part", type=float, default=1.0, help="of each trace; for a first look")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and bursts")
    parser.add_argument("--scalers", default="slo,busy,backlog")
    args = parser.parse_args()
    runs: list[Run] = []
    print("| trace | scaler | attained | TTFT p99, s | GPU-hours | P + D | most | changes |")
    for name in args.only:
        traffic = make_traffic(name, args.part, args.seed)
        for scaler in scalers():
            if scaler.kind in args.scalers.split(","):
                runs.append(run(scaler, traffic))
                print(_ROW.format(**runs[-1]), f"{runs[-1]['wall_s']:.0f} s", flush=True)
    for row in compare(runs):
        print(row)
    if args.part == 1.0:
        keep(runs)


if __name__ == "__main__":
    main()
