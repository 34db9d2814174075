"""Runs the arrivals of a measured load once more, in virtual time, with the step times of the very
nodes that served it: what the router's and the planner's code say that clients should have seen.

    arrivals     as they were sent
    steps        the medians of prompts by tokens in a step, of decode by rows, and of what chunks
                 of prompts made decode steps longer, from `/steps`
    objective    that of the nodes, by which they cut prompts beside answers; the simulated ones
                 plan by the sizes of graphs that engines record, too
    overhead     what first tokens took besides their prompt's step where no other prompt was on the
                 node: HTTP, router, the calls between nodes, the wake-ups of their processes. It
                 varies: each simulated first token draws one of those that were seen
    ideal        the same prompts in one queue before as many servers, alone and without overhead

Where live figures are higher than simulated ones, real processes lose time that no model of them
has: `ttft_parts_ms`, `late_steps` and `pauses` of the same row say where.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from bench.figures import Figures, distribution_ms, one_queue, percentile
from bench.serving.figures.node_history import gaps
from bench.serving.openai_stream import Outcome
from engine.contracts.steps.step_launches import StepLaunches
from engine.frontend.step_history import HistoryReport
from engine.speed.profile import DecodePoint, PrefillPoint, SpeedProfile
from planner.evaluation import STEP_LEAD_S
from planner.simulation.cluster import ClusterShape, SimCluster
from planner.simulation.measured import weighted_quantiles, with_spread
from planner.simulation.step_filling import prompt_order
from planner.simulation.step_times import MeasuredTimes, interpolate
from planner.traffic.traffic import Arrival, Traffic, in_order
from router.nodes.registry import NodeRegistry
from router.placement.policy import Policy
from router.placement.tandem_policy import TandemPolicy

_SEEDS = range(5)
"""Ties are broken by chance: figures are the medians of this many runs."""
_TOKENS_TOGETHER = 64
_ROWS_TOGETHER = 4
_LEAST_STEPS = 5
_FEWEST_OF_CHUNK = 16
"""Fewer tokens of prompts are requests whose KV came from a peer: each has one left."""
_FIGURES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")


@dataclass(frozen=True, slots=True)
class StepTimesSeen:
    """Holds the seconds of steps: of prompts by their tokens, of decode steps without joins by
    rows; and by how much those with both were longer than decode steps, by tokens of prompts."""

    prompts: dict[int, list[float]]
    decodes: dict[int, list[float]]
    chunks: dict[int, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, reports: Sequence[HistoryReport]) -> StepTimesSeen:
        prompts: defaultdict[int, list[float]] = defaultdict(list)
        alone: defaultdict[int, list[float]] = defaultdict(list)
        mixed: list[tuple[int, int, float]] = []
        decodes: defaultdict[int, list[float]] = defaultdict(list)
        for report in reports:
            last_end = 0.0
            for step in report.steps:
                if step.ended_at and step.prompt_tokens:
                    tokens = _TOKENS_TOGETHER * -(-step.prompt_tokens // _TOKENS_TOGETHER)
                    seconds = step.ended_at - max(step.issued_at, last_end)
                    prompts[tokens].append(seconds)
                    num_decodes = step.tokens - step.prompt_tokens
                    if num_decodes <= 0:
                        alone[tokens].append(seconds)
                    elif step.prompt_tokens >= _FEWEST_OF_CHUNK:
                        mixed.append((tokens, num_decodes, seconds))
                last_end = max(last_end, step.ended_at)
            for gap in gaps(report):
                if not gap.step.prompt_tokens and not gap.step.new_rows:
                    rows = _ROWS_TOGETHER * -(-gap.step.rows // _ROWS_TOGETHER)
                    decodes[rows].append(gap.seconds)
        enough = any(len(seconds) >= _LEAST_STEPS for seconds in alone.values())
        return cls(dict(alone if enough else prompts), dict(decodes), _longer(mixed, decodes))

    @property
    def chunk_s(self) -> dict[int, float]:
        """Returns the medians of `chunks`, where enough steps were seen."""
        seen = {n: s for n, s in self.chunks.items() if len(s) >= _LEAST_STEPS}
        return {tokens: statistics.median(seconds) for tokens, seconds in sorted(seen.items())}

    def profile(self, n_in: int, n_out: int, kv_tokens: int) -> SpeedProfile | None:
        """Returns the profile of such a node; None where too few steps were seen."""
        prompts = {n: s for n, s in self.prompts.items() if len(s) >= _LEAST_STEPS}
        decodes = {n: s for n, s in self.decodes.items() if len(s) >= _LEAST_STEPS}
        if not prompts or not decodes:
            return None
        return SpeedProfile(
            name="measured",
            model="measured",
            kv_tokens=kv_tokens,
            max_batched_tokens=max(n_in, *self.prompts),
            overhead_s=0.0,
            prefill=tuple(
                PrefillPoint(1, tokens, statistics.median(seconds))
                for tokens, seconds in sorted(prompts.items())
            ),
            decode=tuple(
                DecodePoint(
                    rows, n_in + n_out / 2, statistics.median(seconds),
                    percentile(sorted(seconds), 0.99),
                )
                for rows, seconds in sorted(decodes.items())
            ),
        )  # fmt: skip


def _longer(
    mixed: Sequence[tuple[int, int, float]], decodes: Mapping[int, Sequence[float]]
) -> dict[int, list[float]]:
    """Returns by how much steps with prompts (their tokens, the rows beside them, seconds) were
    longer than decode steps of as many rows."""
    rows = sorted(decodes)
    medians = [statistics.median(decodes[count]) for count in rows]
    found: defaultdict[int, list[float]] = defaultdict(list)
    for tokens, num_decodes, seconds in mixed if rows else ():
        found[tokens].append(max(0.0, seconds - interpolate(rows, medians, num_decodes)))
    return dict(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedNodes:
    """Counts nodes; without `prefill` the decode nodes compute prompts. `kv_tokens`: of each.
    `itl_objective_s`, `launches`: see `ClusterShape`."""

    prefill: int
    decode: int
    kv_tokens: int
    itl_objective_s: float = 0.0
    launches: StepLaunches | None = None


def simulated(
    row: Figures, outcomes: Sequence[Outcome], start: float, times: StepTimesSeen,
    nodes: SimulatedNodes,
) -> Figures:  # fmt: skip
    """Returns what virtual time gives for the load of `row`, and live figures over it; empty where
    too few steps were seen."""
    n_in, n_out = row["n_in"], row["n_out"]
    profile = times.profile(n_in, n_out, nodes.kv_tokens)
    sent = sorted(one.sent - start for one in outcomes if one.sent is not None)
    if profile is None or not sent or not (row["ttft_ms"] and row["itl_ms"]):
        return {}
    step_s = MeasuredTimes(profile).prompt_s(n_in, n_in)
    overheads = overheads_s(outcomes, step_s)
    arrivals = in_order([Arrival(at_s, n_in, n_out) for at_s in sent])
    traffic = Traffic("measured", arrivals)
    step_times = MeasuredTimes(profile, times.chunk_s)
    runs = [_run(traffic, step_times, nodes, overheads, seed) for seed in _SEEDS]
    found = {name: statistics.median(run[name] for run in runs) for name in _FIGURES}
    live = {name: row[f"{name[:-4]}_ms"][name[-3:]] for name in _FIGURES}
    prompts = [(arrival.at_s, step_s) for arrival in arrivals]
    waits = one_queue(prompts, nodes.prefill or nodes.decode)
    return {
        "simulated": {
            **{f"{name}_ms": round(value, 3) for name, value in found.items()},
            "overhead_ms": distribution_ms(overheads),
            "live_over_simulated": {
                name: round(live[name] / found[name], 3) for name in _FIGURES if found[name]
            },
            "ideal_ttft_ms": distribution_ms(waits),
            "prompt_step_ms": round(1e3 * step_s, 3),
        }
    }


def overheads_s(outcomes: Sequence[Outcome], step_s: float) -> list[float]:
    """Returns what first tokens took besides the step, of prompts that came when none before them
    was without its first token on the same node. Those that met others would count their wait
    twice; those that a decode node computed beside its steps, in a cluster with prefill nodes, the
    steps."""
    told = [(one, one.timeline) for one in outcomes if one.complete and one.timeline]
    told = [pair for pair in told if pair[1]["prefill_node"]] or told
    first_at: defaultdict[str, float] = defaultdict(float)
    found = []
    for one, timeline in sorted(told, key=lambda pair: pair[0].sent or 0.0):
        node = timeline["prefill_node"] or "local"
        assert one.sent is not None
        if one.sent >= first_at[node]:
            found.append(max(0.0, one.ttft_s - step_s))
        first_at[node] = max(first_at[node], one.chunks[0])
    return found


def _run(
    traffic: Traffic,
    times: MeasuredTimes,
    nodes: SimulatedNodes,
    overheads: Sequence[float],
    seed: int,
) -> dict[str, float]:
    """Returns milliseconds. One router that learns of its nodes four times a second, as live."""
    profile = times.profile
    shape = ClusterShape(
        num_prefill=nodes.prefill,
        num_decode=nodes.decode,
        num_routers=1,
        block_tokens=traffic.block_tokens,
        cache_blocks=max(1, nodes.kv_tokens // traffic.block_tokens),
        decode_kv_tokens=nodes.kv_tokens,
        steps=times,
        batched=True,
        max_batched_tokens=profile.max_batched_tokens,
        max_sequences=profile.max_sequences,
        itl_objective_s=nodes.itl_objective_s,
        launches=nodes.launches,
        lead_s=STEP_LEAD_S,
        make_fill=partial(prompt_order, times, profile.max_batched_tokens),
    )
    measured = SimCluster(shape, _policy, seed).run(traffic.sim_requests(), warm_part=0.0)
    draw = random.Random(seed)
    firsts = [t + draw.choice(overheads or (0.0,)) for t in measured.ttft_s]
    ttft = weighted_quantiles([(t, 1.0) for t in firsts], (0.5, 0.99))
    itl = weighted_quantiles(with_spread(measured.gaps, times.spread), (0.5, 0.99))
    return dict(zip(_FIGURES, (1e3 * value for value in (*ttft, *itl)), strict=True))


def _policy(registry: NodeRegistry, rng: random.Random) -> Policy:
    return TandemPolicy(registry, rng)
