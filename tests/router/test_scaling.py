"""The number of nodes that routers ask for: steady, bounded, never a guess; held prompts."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.config import RouterSettings
from router.make_scaling import make_scaling
from router.nodes.address import NodeRole
from router.placement.prefill_outcome import PrefillOutcome
from router.scaling.capacity import PromptWork, StepFit, prefill_nodes, wait_p99_s
from router.scaling.scaling_signal import ScalingObjectives, ScalingSignal
from router.scaling.work_rate import WorkRate
from tests.router.cluster import TIMEOUT_S, Cluster, eventually
from tests.router.factories import Fleet, request
from tests.router.token_server import TokenHandler, expected, texts

PREFILL, DECODE = NodeRole.PREFILL, NodeRole.DECODE
SPEED = 10_000.0
services = st.builds(
    PromptWork,
    mean_s=st.floats(0.001, 5),
    cv2=st.floats(0, 20),
    p99_s=st.floats(0, 20),
)


@given(st.floats(0, 500), st.floats(0, 500), services, st.floats(0.01, 30))
def test_more_load_never_takes_fewer_nodes(
    one: float, other: float, service: PromptWork, ttft_s: float
) -> None:
    low, high = sorted((one, other))
    fewer, more = (prefill_nodes(load, service, ttft_s) for load in (low, high))
    assert fewer <= more * (1 + 1e-9) + 1e-9
    assert low <= fewer, "nodes are at least as many as are busy"


@given(st.floats(0.01, 200), services, st.floats(0.01, 30))
def test_the_nodes_asked_for_keep_the_objective(
    load: float, service: PromptWork, ttft_s: float
) -> None:
    nodes = prefill_nodes(load, service, ttft_s)
    room_s = max(ttft_s - service.p99_s, ttft_s / 4)
    assert wait_p99_s(load, nodes, service) <= room_s * (1 + 1e-6)
    if nodes > load * 1.001:
        assert wait_p99_s(load, nodes * 0.99, service) > room_s * 0.5 or nodes < load + 0.05


def test_the_wait_of_one_server_is_that_of_the_books() -> None:
    """P(wait > t) of one server with exponential service is ρ · exp(−(1 − ρ) t / s̄)."""
    service = PromptWork(2.0, 1.0)
    assert wait_p99_s(0.5, 1, service) == pytest.approx(2.0 / 0.5 * math.log(0.5 / 0.01))
    assert wait_p99_s(0.005, 1, service) == 0.0
    assert wait_p99_s(1.0, 1, service) == math.inf


def test_steps_are_learned_from_answers() -> None:
    fit = StepFit()
    assert fit.seconds(10) == 0.0
    for n in (4, 8, 16, 30) * 50:
        fit.observe(n, 0.004 + 0.0002 * n)
    assert fit.seconds(64) == pytest.approx(0.004 + 0.0128, rel=0.01)
    assert fit.batch_within(0.008) == pytest.approx(20, rel=0.01)
    assert fit.batch_within(0.1) <= 60, "no more than twice what was seen"
    assert fit.batch_within(0.001) == 1.0


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 10)), min_size=1, max_size=60))
def test_a_fit_is_never_absurd(points: list[tuple[float, float]]) -> None:
    fit = StepFit()
    for n, seconds in points:
        fit.observe(n, seconds)
    assert 0 < fit.seconds(1) <= fit.seconds(50) < 1e4
    assert 1 <= fit.batch_within(1.0) <= max(1.0, 2 * max(n for n, _ in points))


def test_a_burst_shows_and_chance_does_not() -> None:
    rng = random.Random(1)
    work = WorkRate(0.0)
    now, seen = 0.0, []
    while now < 1200:
        now += rng.expovariate(10)
        work.add(now, 1.0)
        if now > 150:
            seen.append(work.rate(now))
    assert min(seen) > 8.5 and max(seen) < 12
    for i in range(300):
        work.add(now + i / 30, 1.0)
    assert work.rate(now + 10) > 15, "ten seconds of three times as much"
    assert work.rate(now + 400) == 0.0
    assert work.peak(now + 401) == 0.0


class Site:
    """A signal with nodes that report, under a manual clock."""

    def __init__(self, prefill: int = 2, decode: int = 1, num_routers: int = 1) -> None:
        self.fleet = Fleet()
        self.sequence = 1
        for i in range(prefill):
            self.fleet.add(f"p{i}", PREFILL, prefill_tokens_per_s=SPEED)
        for i in range(decode):
            self.fleet.add(f"d{i}", DECODE, num_total_blocks=10_000, block_size=16)
        registry = self.fleet.registry
        self.signal = ScalingSignal(
            objectives=ScalingObjectives(1.0, 0.05),
            nodes=registry.nodes,
            state=registry.state,
            clock=self.fleet.clock,
            num_routers=num_routers,
        )

    def report(self) -> None:
        self.sequence += 1
        for node in self.fleet.registry.all_nodes():
            assert node.report is not None
            fresh = replace(node.report, sequence=self.sequence)
            self.fleet.registry.apply_report(node.address, fresh)

    def run(
        self, rate: float, seconds: float, tokens: int = 1000,
        each: Callable[[], None] = lambda: None, rng: random.Random | None = None,
    ) -> None:  # fmt: skip
        """Lets requests come evenly, or as Poisson arrivals of `rng`."""
        clock, end = self.fleet.clock, self.fleet.clock.now + seconds
        tick = clock.now
        while clock.now < end:
            pause = rng.expovariate(rate) if rng else 1 / rate
            clock.now += pause
            self.signal.arrived(request(num_prompt_tokens=tokens))
            while tick + 1 <= clock.now:
                tick += 1
                self.report()
                each()

    def learn_steps(self) -> None:
        for n in (2, 10, 20, 30) * 20:
            self.signal.finished(101, 100 * (0.01 + 0.001 * n), n)


def replicas_of(share: float, current: int) -> int:
    """Rounds as a HorizontalPodAutoscaler does with a target of 1 on each."""
    if abs(1 - share / current) <= 0.1:
        return current
    return max(1, math.ceil(share))


def test_the_signal_follows_the_load() -> None:
    site = Site()
    site.run(5, 200)
    low = site.signal.desired(PREFILL)
    site.run(20, 200)
    high = site.signal.desired(PREFILL)
    assert low is not None and high is not None
    assert 0.5 < low < 2 and 2 < high < 4, "0.5 and 2 busy nodes, with room to keep a second"
    outcome = PrefillOutcome(num_prompt_tokens=10**6, num_cached_tokens=9 * 10**5)
    site.signal.observe(request(num_prompt_tokens=10**6), outcome)
    site.run(20, 200)
    cached = site.signal.desired(PREFILL)
    assert cached is not None and cached < high / 3, "nine tenths of prompts are cached"


def test_prompts_that_their_node_refuses_ask_for_no_node() -> None:
    """Also while others are on their way: the signal stays what it would be without them."""
    quiet, flooded = Site(), Site()
    unfit = request(num_prompt_tokens=100_000)

    def flood() -> None:
        for _ in range(10):
            flooded.signal.arrived(unfit)
        for _ in range(10):
            flooded.signal.unfit(unfit)

    quiet.learn_steps()
    flooded.learn_steps()
    quiet.run(5, 200)
    flooded.run(5, 200, each=flood)
    for role in (PREFILL, DECODE):
        wanted = quiet.signal.desired(role)
        assert flooded.signal.desired(role) == pytest.approx(wanted, rel=0.02), role


def test_what_is_taken_back_late_is_no_negative_work() -> None:
    work = WorkRate(0.0)
    work.add(1.0, 500.0)
    work.take_back(200.0, 500.0)
    assert work.rate(200.0) == 0.0
    work.add(201.0, 500.0)
    assert work.rate(201.0) >= 0.0


def test_constant_load_never_flaps() -> None:
    """Poisson arrivals, read every 15 s: one number of nodes, but for the beginning."""
    for rate in (7.0, 31.0):
        site = Site()
        counts: list[int] = [2]

        def read(site: Site = site, counts: list[int] = counts) -> None:
            share = site.signal.desired(PREFILL) if site.sequence % 15 == 0 else None
            if share is not None:
                counts.append(replicas_of(share, counts[-1]))

        site.run(rate, 2400, each=read, rng=random.Random(5))
        # Scaling down waits for the greatest wish of five minutes.
        settled = counts[60:]
        windows = [max(settled[i : i + 20]) for i in range(len(settled) - 20)]
        assert max(windows) - min(windows) <= 1, (rate, windows)
        changes = sum(a != b for a, b in pairwise(windows))
        assert changes <= 2, (rate, windows)


def test_shares_of_routers_add_up() -> None:
    alone = Site()
    alone.run(40, 200)
    parts = [Site(num_routers=4) for _ in range(4)]
    for part in parts:
        part.run(10, 200)
    total = sum(part.signal.desired(PREFILL) or 0 for part in parts)
    assert total == pytest.approx(alone.signal.desired(PREFILL), rel=0.05)


def test_blind_is_absent_and_no_zero() -> None:
    site = Site()
    assert site.signal.desired(PREFILL) is None, "nobody has listened yet"
    site.run(5, 20)
    assert site.signal.desired(PREFILL) is not None
    assert site.signal.desired(DECODE) is None, "no answer has told how long steps are"
    site.learn_steps()
    assert site.signal.desired(DECODE) is not None
    site.fleet.clock.now += 60
    assert site.signal.desired(PREFILL) is None, "reports are lost"
    assert site.signal.desired(DECODE) is None
    site.report()
    assert site.signal.desired(PREFILL) is not None
    silent = ScalingSignal(
        objectives=ScalingObjectives(), nodes=site.fleet.registry.nodes,
        state=site.fleet.registry.state, clock=site.fleet.clock,
    )  # fmt: skip
    site.run(1, 100)
    assert silent.desired(PREFILL) is None and silent.desired(DECODE) is None


def test_a_router_that_starts_keeps_what_there_is() -> None:
    site = Site(prefill=6, num_routers=2)
    site.run(1, 60)
    assert site.signal.desired(PREFILL) == pytest.approx(3.0)
    site.run(1, 200)
    assert site.signal.desired(PREFILL) < 1


def test_nobody_asks_for_nothing() -> None:
    site = Site()
    site.run(5, 30)
    for _ in range(300):
        site.fleet.clock.now += 1
        site.report()
        share = site.signal.desired(PREFILL)
    assert share == 0.0, "no request in three minutes: a tier may go to zero"


def test_work_without_a_prefill_node_asks_for_one() -> None:
    site = Site(prefill=0, num_routers=4)
    assert site.signal.desired(PREFILL) is None
    site.signal.held(1)
    assert site.signal.desired(PREFILL) == 0.25, "even of a router that has just started"
    site.signal.held(-1)
    site.run(5, 30)
    assert (site.signal.desired(PREFILL) or 0) >= 0.25, "decode nodes compute these"


def test_requests_for_many_models_lose_no_model_that_waits_for_a_node() -> None:
    """Clients make names up while not every node has reported."""
    fleet = Fleet()
    signals = make_scaling(RouterSettings(slo_ttft_ms=200.0), fleet.registry)
    signals.of("waits").held(1)
    for number in range(1100):
        signals.of(f"other-{number}")
    assert signals.of("waits").desired(NodeRole.PREFILL) == pytest.approx(1.0)
    signals.of("waits").held(-1)
    for number in range(1100):
        signals.of(f"other-{number}")
    assert signals.get("waits") is None


def test_prefill_nodes_count_by_their_weights_whatever_they_are_called() -> None:
    """As they are placed on: those of another name that fit, and none of this name that fit not."""
    fleet = Fleet()
    fleet.add("d", model_name="chat", model_aliases=("c",), fingerprint="w")
    signals = make_scaling(RouterSettings(slo_ttft_ms=200.0), fleet.registry)
    fleet.add("p-new", PREFILL, model_name="chat", fingerprint="next weights")
    assert signals.of("chat").nodes(PREFILL) == []
    other = fleet.add("p0", PREFILL, model_name="pool", fingerprint="w", prefill_tokens_per_s=1e4)
    for name in ("chat", "c", ""):
        assert other in signals.of(name).nodes(PREFILL)
        signals.of(name).arrived(request(num_prompt_tokens=1000))
        assert signals.of(name).predicted_ttft_s() == pytest.approx(0.1)
    fleet.add("p1", PREFILL, model_name="pool", fingerprint="w", draining=True, drained=True)
    assert signals.of("chat").num_drained(PREFILL) == 1
    own = fleet.add("p2", PREFILL, model_name="chat", fingerprint="w")
    assert signals.of("chat").nodes(PREFILL) == [own], "as long as one has its name"
    assert signals.of("pool").nodes(PREFILL) == [other], "no decode node says what fits it"


def test_decode_follows_tokens_and_room() -> None:
    site = Site()
    site.learn_steps()
    site.run(5, 200)
    few = site.signal.desired(DECODE)
    site.run(10, 200)
    more = site.signal.desired(DECODE)

    # Answers of 101 tokens; 1.3 · (10 + n) ms ≤ 50 ms: n = 28.5, steps of 38.5 ms; a tenth more,
    # which autoscalers tolerate.
    def nodes(rate: float, seconds: float, batch: float) -> float:
        mean = rate * seconds
        return 1.1 * (mean + 3 * math.sqrt(mean)) / batch

    assert few == pytest.approx(nodes(5, 101 * 0.0385, 28.5), rel=0.1)
    assert more == pytest.approx(nodes(10, 101 * 0.0385, 28.5), rel=0.1)
    # 160,000 tokens hold 7.16 such prompts, for 2 s of prefill and 101 steps of 17 ms.
    site.run(10, 200, tokens=20_000)
    crowded = site.signal.desired(DECODE)
    assert crowded is not None and crowded == pytest.approx(nodes(10, 3.73, 7.16), rel=0.05)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0.5, 40), st.integers(1, 30_000)), min_size=1, max_size=4))
def test_the_signal_is_bounded(phases: list[tuple[float, int]]) -> None:
    site = Site()
    site.learn_steps()
    for rate, tokens in phases:
        site.run(rate, 40, tokens)
    share = site.signal.desired(PREFILL)
    most = max(rate * tokens / SPEED for rate, tokens in phases)
    assert share is not None and 0 <= share <= 4 * most + 5
    decode = site.signal.desired(DECODE)
    assert decode is not None and 0 <= decode < 1e4


# Held prompts ------------------------------------------------------------------------------------

LONG = {"model": "demo", "prompt": "long " * 400, "seed": 3, "max_tokens": 3, "stream": True}
HOLDS = {"slo_ttft_ms": 10.0, "prefill_start_s": 0.01, "default_prefill_tokens_per_s": 0.1}
"""Decode nodes would take so long that waiting for a node is worth it for minutes."""


async def test_a_held_prompt_asks_for_a_node_and_gets_it(cluster: Cluster) -> None:
    decode = await cluster.decode("d", TokenHandler())
    prefill = await cluster.prefill("p")
    entry = prefill.entry
    await prefill.stop()
    router = await cluster.router(decode, prefill=entry, prefill_hold_s=TIMEOUT_S, **HOLDS)
    name, labels = "tandem_router_desired_replicas", {"model": "demo", "tier": "prefill"}
    assert router.services.metrics.registry.get_sample_value(name, labels) is None
    asking = asyncio.create_task(router.text(LONG))
    await eventually(lambda: router.metric(name, **labels) >= 1)
    assert not decode.requests, "the decode node has heard nothing yet"
    await prefill.restart()
    assert texts(await asking) == [expected(LONG)]
    assert decode.requests[0][0]["x-prefiller-host-port"] == entry


async def test_a_prompt_that_decode_computes_sooner_is_not_held(cluster: Cluster) -> None:
    decode = await cluster.decode("d", TokenHandler())
    router = await cluster.router(
        decode, prefill_hold_s=TIMEOUT_S, **(HOLDS | {"prefill_start_s": 60_000.0})
    )
    assert texts(await router.text(LONG)) == [expected(LONG)]
    short = {**LONG, "prompt": "hi"}
    assert texts(await router.text(short)) == [expected(short)]


async def test_nobody_is_held_beyond_the_limit(cluster: Cluster) -> None:
    decode = await cluster.decode("d", TokenHandler())
    router = await cluster.router(decode, prefill_hold_s=0.3, **HOLDS)
    async with router.post(LONG) as response:
        said = await response.json()
        assert response.status == 503
        assert int(response.headers["retry-after"]) >= 1
    assert "No prefill node has started within 0 s" in said["error"]["message"]
    signal = router.services.forwarder.attempts.scaling.of("demo")
    assert signal._num_held == 0
