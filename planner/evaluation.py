"""Runs traffic on a cluster of a given size, and says what its clients would see."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from engine.config import PromptOrderName
from engine.speed.profile import SpeedProfile
from planner.simulation.cluster import ClusterShape, SimCluster
from planner.simulation.measured import Measured, weighted_quantiles, with_spread
from planner.simulation.requests import SimRequest
from planner.simulation.step_filling import InOrderOfArrival, StepFilling, prompt_order
from planner.simulation.step_times import MeasuredTimes
from planner.traffic.traffic import Traffic
from router.nodes.registry import NodeRegistry
from router.placement.policy import Policy
from router.placement.tandem_policy import TandemParameters, TandemPolicy

_NUM_ROUTERS = 2
_SEED = 1
_SETTLED_S = 10.0
STEP_LEAD_S = 0.003
"""The lead that `tests/engine/core/virtual_steps.py` finds where a worker's host takes 0.8 to 1.5
ms to start a step."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """Says what is promised: seconds that `percentile` in 100 first tokens, and times between
    tokens, do not exceed."""

    ttft_s: float
    itl_s: float
    percentile: float = 99.0

    @property
    def tail(self) -> str:
        """Returns the percentile's name in reports."""
        return f"p{self.percentile:g}"

    def settled_s(self, mean_output: float) -> float:
        """Returns the seconds of traffic in which nodes fill up and queues show how long they get:
        twice an answer's, and ten at least."""
        return max(_SETTLED_S, 2 * mean_output * self.itl_s)


@dataclass(frozen=True, slots=True, order=True)
class Nodes:
    """Counts nodes. Without `prefill` the decode nodes compute prompts: undivided nodes."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P + {self.decode}D" if self.prefill else f"{self.decode} undivided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Holds what came of it. Seconds; requests and tokens in a second; parts of 1.

    Attributes:
        ttft_tail_s, itl_tail_s: At the percentile of the objectives.
        attained: Requests whose TTFT, and mean time between tokens, are within the objectives.
        goodput: The same in requests a second.
        prefill_busy: Time that prefill nodes spend in steps, of the time in which requests come.
        decode_busy: Running sequences, of those that the ITL objective (or the node) allows.
        prefill_hit: Prompt tokens that were cached where the prompt was computed.
        keeps_up: Prefill nodes compute prompts as fast as they come, or no others follow: their
            queue would grow, however short it was until then.
    """

    nodes: Nodes
    ttft_p50_s: float
    ttft_tail_s: float
    itl_p50_s: float
    itl_tail_s: float
    attained: float
    goodput: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    prefill_busy: float
    decode_busy: float
    prefill_hit: float
    keeps_up: bool

    def begins_in_time(self, objectives: Objectives) -> bool:
        return self.keeps_up and self.ttft_tail_s <= objectives.ttft_s

    def meets(self, objectives: Objectives) -> bool:
        return self.begins_in_time(objectives) and self.itl_tail_s <= objectives.itl_s


@dataclass(slots=True)
class Evaluator:
    """Simulates clusters of different sizes with the same traffic; what was simulated once is
    remembered. `prompt_order`: the setting of the nodes."""

    profile: SpeedProfile
    traffic: Traffic
    objectives: Objectives
    times: MeasuredTimes = field(init=False)
    warm_part: float = 0.1
    prompt_order: PromptOrderName = "shortest"
    _requests: list[SimRequest] = field(init=False)
    _known: dict[Nodes, Forecast] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.times = MeasuredTimes(self.profile)
        self._requests = self.traffic.sim_requests()

    def outcome(self, nodes: Nodes) -> Forecast:
        if nodes not in self._known:
            self._known[nodes] = self._simulate(nodes)
        return self._known[nodes]

    def batch_limit(self) -> int:
        """Returns the most sequences of mean length whose step is within the ITL objective, and
        that a node has room for; at least 1."""
        profile, traffic = self.profile, self.traffic
        context = traffic.mean_prompt + traffic.mean_output / 2
        room = int(profile.kv_tokens / (traffic.mean_prompt + traffic.mean_output))
        most = max(1, min(profile.max_sequences, room))
        fits = (n for n in range(most, 0, -1)
                if self.times.decode_s(n, n * context) <= self.objectives.itl_s)  # fmt: skip
        return next(fits, 1)

    def _simulate(self, nodes: Nodes) -> Forecast:
        cluster = SimCluster(self._shape(nodes), self._make_policy, _SEED)
        measured = cluster.run(self._requests, self.warm_part)
        return self._outcome(nodes, cluster, measured)

    def _shape(self, nodes: Nodes) -> ClusterShape:
        profile = self.profile
        return ClusterShape(
            num_prefill=nodes.prefill,
            num_decode=nodes.decode,
            num_routers=_NUM_ROUTERS,
            report_s=1.0,
            block_tokens=self.traffic.block_tokens,
            cache_blocks=profile.kv_tokens // self.traffic.block_tokens,
            decode_kv_tokens=profile.kv_tokens,
            steps=self.times,
            batched=True,
            max_batched_tokens=profile.max_batched_tokens,
            max_sequences=profile.max_sequences,
            lead_s=STEP_LEAD_S,
            overhead_s=profile.overhead_s,
            make_fill=self._make_fill,
        )

    def _make_fill(self) -> StepFilling:
        if self.prompt_order == "arrival":
            return InOrderOfArrival()
        return prompt_order(self.times, self.profile.max_batched_tokens)

    def _make_policy(self, registry: NodeRegistry, rng: random.Random) -> Policy:
        speed = self.times.tokens_per_s(max(1, round(self.traffic.mean_prompt)))
        return TandemPolicy(registry, rng, TandemParameters(prefill_tokens_per_s=speed))

    def _outcome(self, nodes: Nodes, cluster: SimCluster, measured: Measured) -> Forecast:
        limits = self.objectives
        shares = (0.5, limits.percentile / 100)
        ttft = weighted_quantiles([(t, 1.0) for t in measured.ttft_s], shares)
        itl = weighted_quantiles(with_spread(measured.gaps, self.times.spread), shares)
        counted = self._requests[int(self.warm_part * len(self._requests)) :]
        span_s = max(1e-9, counted[-1].at_s - counted[0].at_s)
        good = sum(t <= limits.ttft_s and g <= limits.itl_s for _, t, g in measured.answers)
        offered_s = max(1e-9, self.traffic.span_s)
        busy_s = sum(node.engine.busy_s for node in cluster.prefills)
        prefill_busy = busy_s / (offered_s * max(1, nodes.prefill))
        sequences = sum(node.engine.sequence_s for node in cluster.decodes) / offered_s
        return Forecast(
            nodes=nodes,
            ttft_p50_s=ttft[0],
            ttft_tail_s=ttft[1],
            itl_p50_s=itl[0],
            itl_tail_s=itl[1],
            attained=good / len(counted),
            goodput=good / span_s,
            output_tokens_per_s=measured.num_output / span_s,
            prompt_tokens_per_s=measured.num_prompt / span_s,
            prefill_busy=min(1.0, prefill_busy),
            decode_busy=sequences / (self.batch_limit() * nodes.decode),
            prefill_hit=measured.num_cached / max(1, measured.num_prompt),
            keeps_up=prefill_busy <= 1 or not self.traffic.goes_on,
        )
