"""The simulated engine keeps time as one does by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from engine.contracts.steps.step_launches import GraphKey, StepLaunches
from engine.speed.profile import DecodePoint, PrefillPoint, SpeedProfile
from planner.simulation.cluster import ClusterShape, SimCluster
from planner.simulation.engine import steps_s, steps_until
from planner.simulation.measured import weighted_quantiles, with_spread
from planner.simulation.step_times import MeasuredTimes, Part, interpolate
from planner.traffic.traffic import Arrival, Traffic
from router.placement.tandem_policy import TandemPolicy


@dataclass(frozen=True)
class HandTimes:
    """A token of a prompt takes a millisecond; a decode step ten, and one for each sequence."""

    def decode_s(self, num_sequences: int, num_kv: float) -> float:
        return 0.010 + 0.001 * num_sequences

    def step_s(self, parts: Sequence[Part], num_sequences: int, num_kv: float) -> float:
        return sum(part.num_new for part in parts) / 1000 + self.decode_s(num_sequences, num_kv)


def run(arrivals: list[Arrival], **shape: object) -> SimCluster:
    settings = {"num_prefill": 1, "num_decode": 1, "num_routers": 1, "batched": True}
    cluster = SimCluster(
        ClusterShape(steps=HandTimes(), **(settings | shape)),  # type: ignore[arg-type]
        lambda registry, rng: TandemPolicy(registry, rng),
        1,
    )
    cluster.run(Traffic("t", tuple(arrivals)).sim_requests(), 0.0)
    return cluster


def test_one_request_alone() -> None:
    measured = run([Arrival(0.0, 100, 5)]).measured
    assert measured.ttft_s == pytest.approx([0.110])
    assert measured.answers[0] == pytest.approx((0.0, 0.110, 0.011))
    assert sum(count for _, count in measured.gaps) == 4
    assert sum(s * count for s, count in measured.gaps) == pytest.approx(4 * 0.011)


def test_prompts_share_a_step_up_to_its_budget() -> None:
    """The second and third come while the first computes; the budget takes the second and half of
    the third."""
    arrivals = [Arrival(0.0, 100, 1), Arrival(0.01, 100, 1), Arrival(0.02, 100, 1)]
    measured = run(arrivals, max_batched_tokens=150).measured
    assert measured.ttft_s == pytest.approx([0.110, 0.270 - 0.01, 0.330 - 0.02])


def test_a_sequence_joins_at_the_next_step() -> None:
    """First: alone from 0.11 on, steps of 11 ms. Second: its token is there at 0.22, its first step
    begins at the end of the one under way, at 0.11 + 10 · 0.011 = 0.22, where the clock stands."""
    cluster = run([Arrival(0.0, 100, 30), Arrival(0.005, 90, 3)], max_batched_tokens=100)
    first, second = sorted(cluster.measured.answers)
    assert second[1] == pytest.approx(0.110 + 0.100 - 0.005)
    ends = 0.110 + 9 * 0.011 + 0.011  # nine steps alone, the tenth is under way when it comes
    assert 0.005 + second[1] + 2 * second[2] == pytest.approx(ends - 0.011 + 2 * 0.012, abs=0.012)
    assert first[2] > 0.011


@pytest.mark.parametrize(("lead_s", "joins_at"), [(0.009, 0.220), (0.0105, 0.231)])
def test_a_sequence_that_comes_behind_the_decision_misses_a_step(
    lead_s: float, joins_at: float
) -> None:
    """Its token is there at 0.21, 10 ms before the end of the step under way."""
    arrivals = [Arrival(0.0, 100, 30), Arrival(0.005, 90, 3)]
    _, second = sorted(run(arrivals, max_batched_tokens=100, lead_s=lead_s).measured.answers)
    assert 2 * second[2] == pytest.approx(joins_at - 0.21 + 2 * 0.012)


def test_undivided_nodes_compute_prompts_between_tokens() -> None:
    cluster = run([Arrival(0.0, 10, 20), Arrival(0.05, 200, 2)], num_prefill=0)
    slow = max(seconds for seconds, _ in cluster.measured.gaps)
    assert slow == pytest.approx(0.200 + 0.011), "a running answer waits for the other's prompt"


def test_a_full_decode_node_keeps_prompts_from_prefill() -> None:
    """Two answers of 150 tokens of KV do not fit into 200 at once: the second one's prompt begins
    when the first answer is over."""
    arrivals = [Arrival(0.0, 100, 50), Arrival(0.001, 100, 50)]
    cluster = run(arrivals, decode_kv_tokens=200)
    first, second = sorted(cluster.measured.answers)
    first_ends = first[1] + 49 * first[2]
    assert 0.001 + second[1] == pytest.approx(first_ends + 0.110)


def test_an_idle_cluster_takes_no_time_to_simulate() -> None:
    """Nodes report every second of a year in which nobody comes, and say nothing new."""
    arrivals = [Arrival(0.0, 100, 5), Arrival(365 * 86_400.0, 100, 5)]
    cluster = run(arrivals)
    first, last = cluster.measured.answers
    assert last[1:] == pytest.approx(first[1:], rel=1e-4)
    assert cluster.prefills[0].sequence < 100


def test_long_answers_take_no_time_to_simulate() -> None:
    """Answers of a day overlap, and nobody reads what nodes report meanwhile."""
    arrivals = [Arrival(3600.0 * hour, 100, 8_000_000) for hour in range(3)]
    cluster = run(arrivals)
    assert len(cluster.measured.answers) == 3
    assert cluster.timeline.now > 86_400
    assert cluster.prefills[0].sequence < 100


def test_work_is_the_same_however_it_arrives() -> None:
    """Every gap is counted once and every answer has its tokens, under random load."""
    rng = random.Random(3)
    arrivals = sorted(
        (
            Arrival(rng.random() * 20, rng.randrange(1, 400), rng.randrange(1, 60))
            for _ in range(200)
        ),
        key=lambda arrival: arrival.at_s,
    )
    for num_prefill in (0, 2):
        cluster = run(arrivals, num_prefill=num_prefill, num_decode=2, decode_kv_tokens=5000)
        measured = cluster.measured
        assert len(measured.answers) == 200
        tokens = sum(arrival.num_output - 1 for arrival in arrivals)
        assert sum(count for _, count in measured.gaps) == tokens
        total = sum(seconds * count for seconds, count in measured.gaps)
        outputs = {a.at_s: a.num_output for a in arrivals}
        told = sum(gap * max(1, outputs[at] - 1) for at, _, gap in measured.answers)
        assert total == pytest.approx(told)
        assert all(node.used_tokens == 0 and node.num_running == 0 for node in cluster.decodes)
        assert all(node.engine.is_idle for node in (*cluster.prefills, *cluster.decodes))


@pytest.mark.parametrize("growth_s", [0.0, 1e-6, 0.002])
def test_steps_are_found_by_time(growth_s: float) -> None:
    for count in (1, 2, 7, 50):
        begin = steps_s(count - 1, 0.01, growth_s)
        end = steps_s(count, 0.01, growth_s)
        assert steps_until((begin + end) / 2, 0.01, growth_s) == count


@dataclass
class _Shape:
    profile: SpeedProfile = field(
        default_factory=lambda: SpeedProfile(
            name="p",
            model="m",
            kv_tokens=100_000,
            max_batched_tokens=1000,
            prefill=(PrefillPoint(1, 100, 0.02), PrefillPoint(1, 1000, 0.11)),
            decode=(DecodePoint(1, 100, 0.01, 0.012), DecodePoint(10, 100, 0.02),
                    DecodePoint(10, 1100, 0.03)),
        )
    )  # fmt: skip


def test_measured_times_meet_the_measured_points() -> None:
    times = MeasuredTimes(_Shape().profile)
    assert times.kv_read_s == pytest.approx(0.01 / 10_000)
    assert times.decode_s(10, 1000) == pytest.approx(0.02)
    assert times.decode_s(10, 11_000) == pytest.approx(0.03)
    assert times.prompt_s(1000, 1000) == pytest.approx(0.11)
    assert times.step_s([Part(550, 0)], 0, 0) == pytest.approx(0.065)
    assert times.prompt_s(2000, 2000) == pytest.approx(0.22)
    assert times.spread == pytest.approx(1.2)
    beside = times.step_s([Part(540, 0)], 10, 1000)
    assert beside == pytest.approx(0.065 + times.kv_read_s * 1000)
    assert times.step_s([Part(1, 0)], 10, 1000) == pytest.approx(0.021, abs=0.0011)


def test_attention_to_chosen_tokens_is_no_dearer_than_was_measured() -> None:
    """Tokens of prompts of 1,000 / 2,000 / 8,000 take 11 / 12 / 15 us: 1 us for each thousand, and
    half of it behind. Two lengths alone say 18 us for the last, and 74 for 64,000."""
    full = ((10, 1000, 11e-6), (5, 2000, 12e-6), (2, 8000, 15e-6))
    points = tuple(PrefillPoint(count, n, count * n * each) for count, n, each in full)
    alone = PrefillPoint(1, 1000, 0.011)
    whole, short = (
        MeasuredTimes(msgspec.structs.replace(_Shape().profile, prefill=(alone, *points[:count])))
        for count in (3, 2)
    )
    for times, expected in ((whole, {8000: 15e-6, 64_000: 43e-6}), (short, {64_000: 74e-6})):
        assert times.prompt_s(1000, 1000) == pytest.approx(0.011)
        assert times.pair_s == pytest.approx(2e-9)
        for length, each in expected.items():
            assert times.prompt_s(length, length) == pytest.approx(length * each)
        behind = times.prompt_s(64_000, 64_000) - times.prompt_s(60_000, 60_000)
        assert times.prompt_s(4000, 64_000) == pytest.approx(behind)


def test_chunks_that_were_measured_beside_answers_take_what_they_took() -> None:
    """A decode step takes 20 ms, 5 more with 64 tokens of prompts and 9 more with 128."""
    times = MeasuredTimes(_Shape().profile, {64: 0.005, 128: 0.009})
    assert times.step_s([Part(64, 0), Part(32, 500)], 10, 1000) == pytest.approx(0.027)
    assert times.step_s([Part(550, 0)], 0, 0) == pytest.approx(0.065)


def test_chunks_beside_answers_are_what_graphs_have_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a scheduler cuts them that has the same table. A prompt of 1000 tokens comes while ten
    answers are on their way."""
    cut: list[int] = []
    step_s = HandTimes.step_s

    def noting(times: HandTimes, parts: Sequence[Part], count: int, num_kv: float) -> float:
        if count == 10:
            cut.append(sum(part.num_new for part in parts))
        return step_s(times, parts, count, num_kv)

    monkeypatch.setattr(HandTimes, "step_s", noting)
    arrivals = [Arrival(0.0, 4, 400)] * 10 + [Arrival(1.0, 1000, 2)]
    keys = [GraphKey(64, size, samples) for size in (128, 256) for samples in (True, False)]
    launches = StepLaunches(prompts=tuple(keys))
    run(arrivals, num_prefill=0, itl_objective_s=0.4, launches=launches)
    assert cut[:-1] == [246] * 4 and sum(cut) == 1000


def test_quantiles_weigh() -> None:
    assert weighted_quantiles([(3.0, 1.0), (1.0, 98.0), (2.0, 1.0)], (0.5, 0.99, 1.0)) == [1, 2, 3]
    assert weighted_quantiles([], (0.5, 0.99)) == [0.0, 0.0]
    assert weighted_quantiles(with_spread([(1.0, 100.0)], 1.5), (0.5, 0.99)) == [1.0, 1.5]
    assert interpolate([1, 2, 4], [10, 20, 30], 0.5) == 10
    assert interpolate([1, 2, 4], [10, 20, 30], 8) == 50


def test_decode_nodes_with_room_compute_prompts_that_prefill_nodes_are_late_with() -> None:
    """Ten prompts come at once. One prefill node computes a token in a millisecond; beside their
    answers the decode node has room for half of each step, and takes what would come later."""
    arrivals = [Arrival(0.0, 100, 40)] + [Arrival(0.5 + 0.001 * i, 400, 4) for i in range(10)]
    alone = run(arrivals, itl_objective_s=0.0).measured
    shared = run(arrivals, itl_objective_s=0.4).measured
    assert alone.choices["local"] == 0 < shared.choices["local"]
    assert max(shared.ttft_s) < max(alone.ttft_s)
    longest = max(seconds for seconds, _ in shared.gaps)
    assert longest <= 2 * 0.4, "an answer that joins waits for the step under way, then for its own"
