"""Runs one case of the routing simulation: requests, a cluster in virtual time, and its figures.

Requests are sessions of `bench.workload` with the blocks they share. A prompt is a chain of blocks
of 512 tokens. A session's later prompt begins with the earlier one, and all sessions with a shared
opening begin with the same blocks. Arrivals do not depend on how fast the cluster is.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from bench.figures import one_queue, percentile
from bench.workload import PRESETS, Preset, Session, sessions
from planner.simulation.cluster import ClusterShape, SimCluster
from planner.simulation.measured import weighted_quantiles
from planner.simulation.requests import SimRequest
from planner.simulation.step_times import MeasuredTimes, Part, StepTimes
from router.nodes.registry import NodeRegistry
from router.placement.choose_policy import PolicyName, choose_policy
from router.placement.policy import Policy
from router.placement.tandem_policy import TandemParameters
from router.request.info import RequestInfo, SessionSource

BLOCK_TOKENS = 512
_WARM_S = 1500.0
"""Sessions begin this long before the first request counts, so that later turns are there at
once."""
_ROUTER_BLOCKS = 2
"""The router hashes pieces of about 1024 tokens."""
_GUESS_SPREAD = 0.15
"""The error of the router's guess of a prompt's length, which it makes from the text."""


def make_requests(preset: Preset, requests_per_s: float, count: int, seed: int) -> list[SimRequest]:
    """Makes `count` requests in order of arrival, from time 0 on."""
    rng = random.Random(seed)
    duration_s = 1.3 * count / requests_per_s + _WARM_S
    found: list[SimRequest] = []
    for number, session in enumerate(sessions(preset, requests_per_s, duration_s, seed)):
        found.extend(_turns(session, number, rng))
    found = sorted((r for r in found if r.at_s >= 0), key=lambda request: request.at_s)
    return found[:count]


def at_load(
    requests: Sequence[SimRequest], load: float, service_s: Callable[[SimRequest], float]
) -> list[SimRequest]:
    """Returns the same requests, faster or slower, so that `load` servers without any cache would
    just keep up with them.
    """
    work_s = sum(map(service_s, requests))
    factor = work_s / (load * requests[-1].at_s)
    return [replace(request, at_s=request.at_s * factor) for request in requests]


def with_hot_key(requests: Sequence[SimRequest], part: float) -> list[SimRequest]:
    """Returns the same, but `part` of the sessions say that they are one and the same: a client
    that sends one name for everything.
    """

    def info(request: SimRequest) -> RequestInfo:
        is_hot = random.Random(request.info.session_key).random() < part
        return replace(request.info, session_key=b"hot") if is_hot else request.info

    return [replace(request, info=info(request)) for request in requests]


def _turns(session: Session, number: int, rng: random.Random) -> Iterable[SimRequest]:
    guess = rng.lognormvariate(0, _GUESS_SPREAD)
    at_s, num_prompt = session.start_s - _WARM_S, session.shared_tokens
    previous_output = 0
    for index, turn in enumerate(session.turns):
        at_s += turn.pause_s
        num_prompt += previous_output + turn.new_tokens
        previous_output = turn.output_tokens
        blocks = _blocks(number, session.shared_tokens, num_prompt)
        info = RequestInfo(
            path="/v1/chat/completions",
            request_id=f"{session.session_id}-{index}",
            session_key=session.session_id.encode(),
            session_source=SessionSource.PROMPT,
            is_later_turn=index > 0,
            num_prompt_tokens=round(num_prompt * guess),
            prefix_blocks=blocks[_ROUTER_BLOCKS - 1 :: _ROUTER_BLOCKS],
            tokens_per_block=_ROUTER_BLOCKS * BLOCK_TOKENS * guess,
        )
        yield SimRequest(at_s, num_prompt, turn.output_tokens, blocks, info)


def _blocks(session: int, shared_tokens: int, num_prompt: int) -> tuple[int, ...]:
    shared = shared_tokens // BLOCK_TOKENS
    own = range(shared, num_prompt // BLOCK_TOKENS)
    return (*(-1 - i for i in range(shared)), *((session << 24) + i for i in own))


@dataclass(frozen=True, slots=True)
class Limits:
    """Says what no placement can exceed. `hit`: part of the prompt tokens that one endless cache
    would have. `slo`: requests that an idle node with that cache would answer in time.
    """

    hit: float
    slo: float


def limits(
    requests: Sequence[SimRequest],
    first: int,
    service_s: Callable[[int, int], float],
    slo_s: float,
) -> Limits:
    """Returns the limits of `requests[first:]`. `service_s` (new tokens, prompt tokens)."""
    seen: set[int] = set()
    hits = total = in_time = 0
    for index, request in enumerate(requests):
        known = BLOCK_TOKENS * sum(block in seen for block in request.blocks)
        seen.update(request.blocks)
        if index >= first:
            hits += known
            total += request.num_prompt
            in_time += service_s(request.num_prompt - known, request.num_prompt) < slo_s
    return Limits(hits / total, in_time / (len(requests) - first))


SLO_S = 5.0
WARM_PART = 0.15
_TIME_SCALE = 0.38
"""The scale of the pauses between turns: the trace's hour at the load of 16 nodes."""
_TURNS_PER_NODE_S = 0.57
"""Requests that a node gets in a second at load 1, about; exact in `at_load`."""
HOT_KEY = "hot-key"
_HOT_PART = 0.3
"""The share of all sessions that have the same key in this workload."""


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
    rate: float = 0.0
    """Requests a second in place of `load`, of which it is then the part of the tier."""
    slow_nodes: int = 0
    """This many prefill nodes have half the speed."""
    seed: int = 0
    beside_batch: bool = False
    """A batch without end runs on capacity that nothing else uses."""

    @property
    def num_ordinary(self) -> float:
        """Returns what all prefill nodes can compute, in ordinary ones."""
        return self.shape.num_prefill - self.slow_nodes / 2


Result = dict[str, Any]
"""Holds one run's figures, as `run` makes them."""


@cache
def requests_of(
    workload: str, num_nodes: float, load: float, count: int, seed: int, steps: StepTimes
) -> tuple[list[SimRequest], Limits]:
    """Makes the requests that are `load` of what `num_nodes` can compute with such steps."""
    preset = PRESETS["conversation" if workload == HOT_KEY else workload]
    preset = replace(preset, pause_median_s=preset.pause_median_s * _TIME_SCALE)
    requests = make_requests(preset, _TURNS_PER_NODE_S * load * num_nodes, count, seed)
    if workload == HOT_KEY:
        requests = with_hot_key(requests, _HOT_PART)
    requests = at_load(
        requests, load * num_nodes, lambda r: prompt_s(steps, r.num_prompt, r.num_prompt)
    )
    service_s = partial(prompt_s, steps)
    return requests, limits(requests, int(WARM_PART * count), service_s, SLO_S)


def prompt_s(steps: StepTimes, num_new: int, num_prompt: int) -> float:
    """Returns the seconds of a prompt alone on a node."""
    if isinstance(steps, MeasuredTimes):
        return steps.prompt_s(num_new, num_prompt)
    return steps.step_s([Part(num_new, num_prompt - num_new)], 0, 0)


def run(case: Case) -> Result:
    """Returns the figures of one run."""
    if case.rate:
        case = replace(case, load=_load_of(case))
    steps, shape = case.shape.steps, case.shape
    requests, limit = requests_of(
        case.workload, case.num_ordinary, case.load, case.count, case.seed, steps
    )
    began = time.perf_counter()
    cluster = SimCluster(shape, policy_maker(case), case.seed, [0.5] * case.slow_nodes)
    measured = cluster.run(requests, WARM_PART, _batch_of(case) if case.beside_batch else ())
    wall_s = time.perf_counter() - began
    prompts = [(one.at_s, prompt_s(steps, one.num_prompt, one.num_prompt)) for one in requests]
    ideal = sorted(one_queue(prompts, shape.num_prefill)[int(WARM_PART * len(requests)) :])
    ttft = sorted(measured.ttft_s)
    num_asked = len(ttft) + measured.num_refused
    busy = [node.engine.busy_s for node in cluster.prefills]
    decisions = sorted(measured.decision_s)
    itl_p50_s, itl_p99_s = weighted_quantiles(measured.gaps, (0.5, 0.99))
    return {
        "group": case.group,
        "label": case.label,
        "policy": case.policy,
        "workload": case.workload,
        "load": case.load,
        "num_prefill": shape.num_prefill,
        "num_routers": shape.num_routers,
        "slo": sum(t < SLO_S for t in ttft) / num_asked,
        "slo_limit": limit.slo,
        "refused": measured.num_refused / num_asked,
        "hit": measured.num_cached / measured.num_prompt,
        "hit_limit": limit.hit,
        "ttft_mean_s": statistics.fmean(ttft),
        **{f"ttft_p{q}_s": percentile(ttft, q / 100) for q in (50, 95, 99)},
        "ideal_mean_s": statistics.fmean(ideal),
        **{f"ideal_p{q}_s": percentile(ideal, q / 100) for q in (50, 99)},
        "itl_p50_s": itl_p50_s,  # 0 where decode nodes do not step
        "itl_p99_s": itl_p99_s,
        "work_balance": max(busy) / statistics.fmean(busy),
        "decision_p50_us": 1e6 * statistics.median(decisions),
        "decision_mean_us": 1e6 * statistics.fmean(decisions[: int(0.99 * len(decisions))]),
        "decode_overfull": measured.num_overfull,
        "batch_tokens_per_s": measured.num_batch_tokens / requests[-1].at_s,
        "choices": dict(measured.choices),
        "wall_s": wall_s,
    }


def _batch_of(case: Case) -> Sequence[SimRequest]:
    """Returns the requests of a batch, which are sent again and again."""
    steps, shape = case.shape.steps, case.shape
    return requests_of("1000-300", shape.num_prefill, case.load, 1000, case.seed + 1, steps)[0]


def _load_of(case: Case) -> float:
    """Returns the part of what the nodes can compute that `rate` requests a second are."""
    requests, _ = requests_of(
        case.workload, case.num_ordinary, 1.0, case.count, case.seed, case.shape.steps
    )
    return case.rate * requests[-1].at_s / len(requests)


def policy_maker(case: Case) -> Callable[[NodeRegistry, random.Random], Policy]:
    return lambda registry, rng: choose_policy(case.policy, registry, rng, case.parameters)
