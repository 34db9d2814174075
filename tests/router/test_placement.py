"""The parts of a placement, one by one."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import NoNodeAvailable
from router.nodes.address import NodeRole
from router.nodes.node import Node
from router.nodes.pace import Pace
from router.placement.candidates.decode_choice import DecodeChoice, OutputLengths, step_cost
from router.placement.candidates.node_pool import NodeGroup, NodePool
from router.placement.candidates.prefill_candidates import (
    NUM_OTHERS,
    accepting,
    others,
    prefill_candidates,
)
from router.placement.choose_policy import PolicyName, choose_policy
from router.placement.estimates.service_time import ServiceTime, ServiceTimeFit
from router.placement.estimates.ttft_estimate import TtftEstimator, staleness_factor
from router.placement.local_prefill import LocalPrefillRule
from router.placement.policy import PrefillChoice
from router.placement.prefill_outcome import PrefillOutcome
from router.placement.prefixes.prefix_index import PrefixIndex
from router.placement.prefixes.session_places import SessionPlaces
from router.placement.prefixes.spill import Margin
from router.placement.tandem_policy import TandemParameters, TandemPolicy
from router.request.prompt_blocks import BLOCK_BYTES, hash_blocks
from tests.router.factories import Fleet, address, report, request, served

PREFILL = NodeRole.PREFILL
RNG = random.Random(0)


def node(name: str, role: NodeRole = PREFILL, **fields: Any) -> Node:
    made = Node(address(name, role))
    made.apply(report(role, **fields), now=0.0)
    return made


# Blocks of a prompt ----------------------------------------------------------------------------


def test_equal_beginnings_give_equal_chains() -> None:
    text = random.Random(1).randbytes(3 * BLOCK_BYTES + 10)
    longer = text + b"x" * BLOCK_BYTES
    assert len(hash_blocks(text, 7)) == 3
    assert hash_blocks(longer, 7)[:3] == hash_blocks(text, 7)
    changed = b"?" + text[1:]
    assert not set(hash_blocks(changed, 7)) & set(hash_blocks(text, 7)), (
        "each depends on all before"
    )
    assert hash_blocks(text, 8) != hash_blocks(text, 7)
    assert hash_blocks(b"x" * (BLOCK_BYTES - 1), 7) == ()


# Prefix index ----------------------------------------------------------------------------------


def test_a_match_is_as_long_as_the_beginning_that_the_node_has() -> None:
    index, (a, b, c) = PrefixIndex(1000), (node("a"), node("b"), node("c"))
    index.learn(a, (1, 2, 3), 100)
    index.learn(b, (1, 2, 9), 100)
    match = index.match((1, 2, 3, 4))
    assert [match.num_blocks(n) for n in (a, b, c)] == [3, 2, 0]
    assert match.best(2, RNG) == [a]
    assert index.match((2, 3)).best(2, RNG) == [a], "the chain holds what came before"
    assert index.match(()).best(2, RNG) == []


def test_a_reported_end_stands_for_all_before_it() -> None:
    index, (a, b) = PrefixIndex(1000), (node("a"), node("b"))
    index.learn(a, (1, 2), 100)
    index.note(b, [3])
    match = index.match((1, 2, 3, 4))
    assert (match.num_blocks(a), match.num_blocks(b)) == (2, 3)
    assert match.best(1, RNG) == [b]
    index.retain([a])
    assert index.match((1, 2, 3, 4)).num_blocks(b) == 0


def test_the_end_of_a_chain_is_forgotten_first() -> None:
    index, a = PrefixIndex(1000), node("a")
    index.learn(a, (1, 2, 3, 4), capacity=3)
    assert index.match((1, 2, 3, 4)).num_blocks(a) == 3


def test_the_index_is_bounded_and_all_nodes_share_it() -> None:
    index, nodes = PrefixIndex(50), [node(f"n{i}") for i in range(5)]
    for block in range(0, 1000, 2):
        index.learn(nodes[block % 5], (block, block + 1), capacity=10_000)
        assert index.num_entries <= 50
    assert index.match((996, 997)).num_blocks(nodes[996 % 5]) == 2


def test_a_node_that_is_gone_leaves_nothing() -> None:
    index, a, b = PrefixIndex(1000), node("a"), node("b")
    index.learn(a, (1, 2), 100)
    index.learn(b, (1, 3), 100)
    index.note(a, [9])
    index.retain([b])
    assert index.match((1, 2)).best(5, RNG) == [b]
    assert not list(index.match((8, 9)).holders(1))
    index.learn(node("c"), (7,), 100)
    assert index.num_entries == 3
    index.learn(node("d"), (8,), 100)
    assert index.match((1, 3)).num_blocks(b) == 2, "the bit of the first is used again"
    assert len(index._by_bit) == 3 and max(index._by_bit) < 8


def test_no_prompt_waits_for_all_that_is_forgotten() -> None:
    """All streams of a router would: a model that comes halved 3,000,000 blocks in 9 s."""
    index, (a, b) = PrefixIndex(20_000), (node("a"), node("b"))
    for start in range(0, 20_000, 20):
        index.learn((a, b)[start // 20 % 2], range(start, start + 20), 1 << 20)
    num_before = index.num_entries
    index.retain([b])
    assert index.num_entries == num_before
    assert index.match((0, 1)).num_blocks(a) == 0 and index.match((20, 21)).num_blocks(b) == 2
    index.max_entries = 5_000
    for start in range(100_000, 103_000, 20):
        before = index.num_entries
        index.learn(b, range(start, start + 20), 1 << 20)
        assert before - index.num_entries < 500
        assert index.match(range(start, start + 20)).num_blocks(b) == 20
    assert index.num_entries == 5_000


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=60))
def test_nodes_that_are_gone_give_nothing_to_those_that_come(did: list[tuple[int, int]]) -> None:
    index, nodes = PrefixIndex(1000), [node("n") for _ in range(5)]
    has: dict[Node, set[int]] = {one: set() for one in nodes}
    for which, block in did:
        one = nodes[which]
        if block == 0:
            index.retain([other for other in nodes if other is not one])
            has[one] = set()
        elif block % 2:
            index.learn(one, (block,), 100)
            has[one].add(block)
        else:
            index.note(one, [block])
            has[one].add(block)
        for end in range(1, 10):
            match = index.match((end,))
            assert {n for n in nodes if match.num_blocks(n)} == {n for n in nodes if end in has[n]}


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 6), min_size=1, max_size=5)),
        max_size=30,
    ),
    st.lists(st.integers(0, 6), max_size=6),
    st.integers(1, 8),
)
def test_the_index_agrees_with_plain_lists(
    prompts: list[tuple[int, list[int]]], wanted: list[int], capacity: int
) -> None:
    """Against one ordered dictionary for each node. Blocks hash what came before them."""
    nodes = [node(f"n{i}") for i in range(4)]
    index = PrefixIndex(10_000)
    plain: list[OrderedDict[int, None]] = [OrderedDict() for _ in nodes]

    def chain(blocks: list[int]) -> tuple[int, ...]:
        return tuple(hash(tuple(blocks[: i + 1])) for i in range(len(blocks)))

    for which, blocks in prompts:
        index.learn(nodes[which], chain(blocks), capacity)
        for block in reversed(chain(blocks)):
            plain[which][block] = None
            plain[which].move_to_end(block)
        while len(plain[which]) > capacity:
            plain[which].popitem(last=False)
    match = index.match(chain(wanted))
    for which, known in enumerate(plain):
        expected = 0
        for block in chain(wanted):
            if block not in known:
                break
            expected += 1
        assert match.num_blocks(nodes[which]) == expected


# Service time ----------------------------------------------------------------------------------


def test_the_fit_finds_the_cost_of_prompts() -> None:
    truth, rng = ServiceTime(0.02, 1 / 5000, 1e-9), random.Random(1)
    fit = ServiceTimeFit(tokens_per_s=8000)
    for _ in range(1500):
        prompt = int(rng.lognormvariate(8, 1))
        new = max(1, int(prompt * rng.random()))
        fit.observe(new, prompt, truth.seconds(new, prompt) * rng.lognormvariate(0, 0.1))
    for prompt in (200, 3000, 30_000):
        found = fit.time.seconds(prompt, prompt)
        assert found == pytest.approx(truth.seconds(prompt, prompt), rel=0.1)


def test_nothing_measured_is_the_assumed_speed() -> None:
    fit = ServiceTimeFit(tokens_per_s=4000)
    assert fit.time.seconds(8000, 8000) == pytest.approx(2.0)
    fit.observe(0, 100, 5.0)
    fit.observe(100, 100, 0.0)
    assert fit.time.seconds(8000, 8000) == pytest.approx(2.0)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 100_000), st.integers(0, 100_000), st.floats(1e-4, 100)),
        max_size=60,
    )
)
def test_no_prompt_ever_takes_negative_time(seen: list[tuple[int, int, float]]) -> None:
    fit = ServiceTimeFit(tokens_per_s=8000)
    for new, more, seconds in seen:
        fit.observe(new, new + more, seconds)
    assert min(fit.time.base_s, fit.time.per_token_s, fit.time.per_pair_s) >= 0
    assert fit.mean_s > 0


def test_a_queue_goes_on_as_nodes_report() -> None:
    """However long prompts take that share their steps."""
    fit = ServiceTimeFit(tokens_per_s=8000)
    for _ in range(100):
        fit.observe(100, 100, 5.0)
        fit.observe_queue(0.0)
    assert fit.s_per_queued_token == 1 / 8000
    for _ in range(100):
        fit.observe_queue(2000.0)
    assert fit.s_per_queued_token == pytest.approx(1 / 2000, rel=0.01)


def test_the_pace_of_a_node_ignores_single_delays() -> None:
    pace = Pace()
    for took in (1, 1, 30, 1, 1):
        pace.observe(took, 1.0)
    assert pace.factor == 1.0
    for _ in range(10):
        pace.observe(2.0, 1.0)
    assert pace.factor == 2.0


# Estimate and spill ----------------------------------------------------------------------------


def estimator() -> TtftEstimator:
    return TtftEstimator(fit=ServiceTimeFit(tokens_per_s=1000), base_weight=2, queue_weight=10)


def test_the_estimate_is_queue_and_service() -> None:
    busy = node("a", num_waiting_tokens=3000)
    assert estimator().queue_s(busy, now=0.5) == pytest.approx(3.0)
    assert estimator().costs({busy: 500}, 500, 0.5, node("decode")).ttft_s[busy] == pytest.approx(
        3.5
    )
    busy.pace.factor, busy.pace.is_known = 2.0, True
    assert estimator().queue_s(busy, now=0.5) == pytest.approx(3.0)
    assert estimator().costs({busy: 500}, 500, 0.5, node("decode")).ttft_s[busy] == pytest.approx(4)


def test_a_queue_empties_at_the_rate_that_the_node_reports() -> None:
    """Prompts that share their steps take long each, and are computed together all the same."""
    batching = node("a", num_waiting_tokens=3000, prefill_tokens_per_s=10_000.0)
    batching.pace.factor, batching.pace.is_known = 60.0, True
    assert estimator().queue_s(batching, now=0.5) == pytest.approx(0.3)


def test_before_any_prompt_the_reported_speed_counts() -> None:
    assert estimator().pace(node("a", prefill_tokens_per_s=500.0)) == pytest.approx(2.0)


def test_old_reports_are_doubted() -> None:
    assert [staleness_factor(age) for age in (0.0, 1.0, 3.0)] == [1.0, 1.0, 1.5]


def test_nodes_of_nearly_equal_pace_are_equal() -> None:
    close, slow = node("close"), node("slow")
    for target, factor in ((close, 1.2), (slow, 1.3)):
        target.pace.factor, target.pace.is_known = factor, True
    assert [estimator().pace(target) for target in (close, slow)] == [1.0, 1.3]


def test_computing_again_costs_more_when_even_the_best_node_is_busy() -> None:
    """A token that another node has counts `weight` times, one that none has once."""
    idle, busy = node("idle"), node("busy", num_waiting_tokens=1000)
    costs = estimator().costs({idle: 1000, busy: 100}, 1000, 0.0, node("decode")).cost_s
    assert costs[idle] == pytest.approx(1.0 + (2 - 1) * 0.9)
    assert costs[busy] == pytest.approx(1.0 + 0.1)
    other = node("other", num_waiting_tokens=1000)
    costs = estimator().costs({other: 1000, busy: 100}, 1000, 0.0, node("decode")).cost_s
    assert costs[other] == pytest.approx(1.0 + 1.0 + (2 + 10 * 1.0 - 1) * 0.9)
    assert costs[busy] == pytest.approx(1.0 + 0.1)


def test_prompts_that_no_node_has_cost_queue_and_service() -> None:
    waiting = {node(f"n{i}", num_waiting_tokens=100 * i): 500 for i in range(4)}
    costs = estimator().costs(waiting, 500, 0.0, node("decode")).cost_s
    assert list(costs.values()) == pytest.approx([0.5, 0.6, 0.7, 0.8])


def test_a_margin_has_a_factor_and_a_number_of_services() -> None:
    margin = Margin(ratio=0.5, services=2.0)
    for part in (0.25, 1.0):
        assert margin.keeps(4.0, best_s=2.0, mean_service_s=0.5, cached_part=part)
        assert not margin.keeps(4.1, best_s=2.0, mean_service_s=0.5, cached_part=part)
    assert margin.keeps(3.0, best_s=2.0, mean_service_s=0.5, cached_part=0.125)
    assert not margin.keeps(3.1, best_s=2.0, mean_service_s=0.5, cached_part=0.125)
    assert not margin.keeps(2.1, best_s=2.0, mean_service_s=0.5, cached_part=0.0)


def test_places_of_sessions_are_bounded_and_forgotten_with_their_node() -> None:
    places, (a, b) = SessionPlaces(max_sessions=2), (node("a"), node("b"))
    places.note(b"1", a)
    places.note(b"2", b)
    places.note(b"1", a)
    places.note(b"3", b)
    found = [places.find(key, {a, b}) for key in (b"1", b"2", b"3")]
    assert found == [a, None, b], "the one that was longest not used gave way"
    assert places.find(b"1", {b}) is None
    places.retain([b])
    assert places.find(b"1", {a, b}) is None and places.find(b"3", {a, b}) is b
    places.retain([])
    assert places.find(b"3", {a, b}) is None
    places.note(b"1", a)
    places.note(b"1", b)
    places.retain([b])
    assert places.find(b"1", {b}) is b
    places.retain([a])
    assert places.find(b"1", {a, b}) is None
    places.note(b"2", a)
    assert places.find(b"1", {a, b}) is None and places.find(b"2", {a, b}) is a


# Candidates ------------------------------------------------------------------------------------


def test_candidates_are_home_matches_and_a_few_at_random() -> None:
    nodes = [node(f"n{i}") for i in range(100)]
    group, index = NodeGroup(tuple(nodes)), PrefixIndex(1000)
    for holder in nodes[40:50]:
        index.learn(holder, (1,), 10)
    match, rng = index.match((1,)), random.Random(2)
    found = prefill_candidates(group, [nodes[7]], match, rng)
    assert found[0] is nodes[7]
    assert set(found[1:3]) < set(nodes[40:50])
    assert len(found) == len(set(found)) <= 3 + NUM_OTHERS
    holders = {n for _ in range(200) for n in match.best(2, rng)}
    assert holders == set(nodes[40:50]), "not always the same two of many"
    assert len({n for _ in range(200) for n in prefill_candidates(group, [], match, rng)}) == 100


def test_of_many_nodes_the_others_are_idle_ones() -> None:
    """One node in eight is idle: four at random would miss them all more often than not."""
    nodes, rng = [node(f"n{i}", num_waiting_tokens=i % 8) for i in range(1000)], random.Random(0)
    drawn = [others(nodes, rng) for _ in range(100)]
    assert sum(few[0].predicted_tokens == 0 for few in drawn) > 80
    assert {n.predicted_tokens for n in others(nodes[:32], rng)} == {0, 1}, "all of few are seen"


def test_which_of_equally_idle_nodes_comes_first_is_left_to_chance() -> None:
    rng = random.Random(0)
    for count in (3, 20):
        nodes = [node(f"n{i}") for i in range(count)]
        assert {others(nodes, rng)[0] for _ in range(400)} == set(nodes)


def test_of_a_small_group_all_are_candidates() -> None:
    nodes = [node(f"n{i}") for i in range(5)]
    found = prefill_candidates(
        NodeGroup(tuple(nodes)), [nodes[3]], PrefixIndex(9).match(()), random.Random(1)
    )
    assert found[0] is nodes[3]
    assert set(found) == set(nodes)


def test_matches_outside_the_group_are_no_candidates() -> None:
    index, stranger = PrefixIndex(9), node("stranger")
    index.learn(stranger, (1,), 10)
    group = NodeGroup(tuple(node(f"n{i}") for i in range(20)))
    assert stranger not in prefill_candidates(group, [], index.match((1,)), random.Random(1))


def test_a_probed_node_is_left_out_unless_there_is_no_other() -> None:
    sick, well = node("sick"), node("well")
    sick.health.half_open = True
    assert accepting([sick, well]) == [sick, well]
    with sick.hold_tokens(1):
        assert accepting([sick, well]) == [well]
        assert accepting([sick]) == [sick]


# The pool --------------------------------------------------------------------------------------


def test_the_pool_looks_at_the_nodes_only_when_something_happened() -> None:
    fleet = Fleet()
    fleet.add("d")
    fleet.add("p", PREFILL)
    pool = NodePool(registry=fleet.registry)
    group = pool.partners(fleet.node("d"))
    assert group.nodes == (fleet.node("p"),)
    fleet.registry.apply_report(fleet.node("p").address, report(PREFILL, sequence=2))
    assert pool.partners(fleet.node("d")) is group, "the same nodes are the same group"
    fleet.registry.mark_disconnected(fleet.node("p").address)
    fleet.add("q", PREFILL)
    assert pool.partners(fleet.node("d")).nodes == (fleet.node("q"),)


def test_time_alone_makes_nodes_suspect() -> None:
    fleet = Fleet()
    late = fleet.add("late")
    pool = NodePool(registry=fleet.registry, refresh_s=0.1)
    assert pool.decodes("demo").nodes == (late,)
    fleet.clock.now += 3.5
    fresh = fleet.add("fresh")
    assert pool.decodes("demo").nodes == (fresh,)
    assert pool.decodes("another").nodes == ()


def test_a_node_in_doubt_is_tried_when_all_others_were() -> None:
    fleet = Fleet()
    late = fleet.add("late")
    fleet.clock.now += 3.5
    fresh = fleet.add("fresh")
    policy = tandem(fleet)
    assert {policy.place(request()).decode for _ in range(20)} == {fresh}
    assert policy.place(request(), [fresh]).decode is late
    with pytest.raises(NoNodeAvailable):
        policy.place(request(), [fresh, late])


# Decode ----------------------------------------------------------------------------------------


def decode(name: str, used: int = 0, **fields: Any) -> Node:
    size = {"num_total_blocks": 100, "num_free_blocks": 100 - used, "block_size": 10}
    return node(name, NodeRole.DECODE, **size, **fields)


def test_a_request_goes_where_its_kv_fits() -> None:
    choice = DecodeChoice(rng=random.Random(1))
    full, roomy = decode("full", used=85), decode("roomy", used=40, num_running_requests=9)
    assert not choice.fits(full, 100)
    assert {choice.pick([full, roomy], 100) for _ in range(20)} == {roomy}
    many = [decode(f"f{i}", used=85) for i in range(20)]
    assert {choice.pick([*many, roomy], 100) for _ in range(20)} == {roomy}, "drawn or not"
    assert choice.pick(many, 100) in many, "nobody has room: somebody has to take it"


def test_own_placements_count_before_the_next_report() -> None:
    target = decode("d", used=50)
    with target.hold_request(300):
        assert target.kv_usage_with(0) == pytest.approx(0.8)
        target.apply(report(num_total_blocks=100, num_free_blocks=20, block_size=10), now=1.0)
        assert target.kv_usage_with(0) == pytest.approx(0.8)
    assert target.kv_usage_with(0) == pytest.approx(0.8)
    assert target.work.recent_kv_tokens == 0


def test_context_costs_as_sequences_do() -> None:
    assert step_cost(decode("a", num_running_requests=3)) == 3
    assert step_cost(decode("b", used=50, num_running_requests=3)) == pytest.approx(3.5)


def test_answers_teach_how_long_answers_get() -> None:
    lengths, rng = OutputLengths(), random.Random(1)
    assert lengths.expected(request()) == 400
    for _ in range(3000):
        lengths.observe("m", rng.randrange(100))
    assert 60 < lengths.expected(request(model="m")) < 90, "three in four are not longer"
    assert lengths.expected(request(model="m", max_tokens=5)) == 5


# Short prompts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "remote_s", "used", "local"),
    [
        (200, 0.0, 0, True),
        (300, 0.1, 0, False),
        (300, 9.0, 0, True),
        (2000, 99.0, 0, False),
        (200, 0.0, 90, False),
    ],
)
def test_short_prompts_are_computed_on_the_decode_node(
    tokens: int, remote_s: float, used: int, local: bool
) -> None:
    rule, target = LocalPrefillRule(short_tokens=256), decode("d", used=used)
    target.apply(report(num_total_blocks=1000, num_free_blocks=1000 - 10 * used, block_size=10), 0)
    assert rule.local_s(target, tokens, 0.3, remote_s) == (0.3 if local else math.inf)
    assert LocalPrefillRule().local_s(target, tokens, 0.3, remote_s) == math.inf


@pytest.mark.parametrize(
    ("slack", "waiting", "used", "remote_s", "local"),
    [
        (10_000.0, 0, 0, 0.25, True),
        (10_000.0, 0, 0, 0.23, False),
        (10_000.0, 1000, 0, 0.25, False),
        (0.0, 0, 0, 99.0, False),
        (10_000.0, 0, 90, 99.0, False),
    ],
)
def test_prompts_are_deflected_to_a_decode_node_that_has_room_in_its_steps(
    slack: float, waiting: int, used: int, remote_s: float, local: bool
) -> None:
    """The decode node takes 0.2 s for 2000 tokens; elsewhere it must take a fifth more."""
    target, rule = decode("d"), LocalPrefillRule()
    told = report(
        num_total_blocks=1000,
        num_free_blocks=1000 - 10 * used,
        block_size=10,
        num_waiting_tokens=waiting,
        slack_tokens_per_s=slack,
    )
    target.apply(told, 0)
    found = rule.local_s(target, 2000, 99.0, remote_s)
    assert found == (pytest.approx(0.2) if local else math.inf)


def test_a_deflected_prompt_counts_as_work_of_the_decode_node() -> None:
    """Routers hold it until its first token: the next prompt finds the room taken."""
    fleet = fleet_of(1, num_waiting_tokens=100_000, prefill_tokens_per_s=100_000.0)
    told = {"num_total_blocks": 10_000, "num_free_blocks": 10_000, "block_size": 16}
    target = fleet.add("roomy", slack_tokens_per_s=10_000.0, **told)
    fleet.registry.apply_report(fleet.node("d").address, report(sequence=2, draining=True))
    policy = tandem(fleet)
    placement = policy.place(request(num_prompt_tokens=5000))
    assert (placement.choice, placement.prefills) == (PrefillChoice.LOCAL, ())
    assert placement.ttft_s == pytest.approx(0.5)
    with placement.hold_decode(), placement.hold_prefill():
        assert target.predicted_tokens == 5000
        assert policy.place(request(num_prompt_tokens=5000)).choice is not PrefillChoice.LOCAL
    assert target.predicted_tokens == 0


# Policies --------------------------------------------------------------------------------------


def fleet_of(count: int, **fields: Any) -> Fleet:
    fleet = Fleet()
    fleet.add("d")
    for i in range(count):
        fleet.add(f"p{i}", PREFILL, **fields)
    return fleet


def first_nodes(name: PolicyName, fleet: Fleet, count: int, **fields: Any) -> list[str]:
    policy = choose_policy(name, fleet.registry, random.Random(1), TandemParameters())
    placed = [policy.place(request(num_prompt_tokens=100, **fields)) for _ in range(count)]
    return [placement.prefills[0].address.target for placement in placed]


def test_round_robin_takes_one_after_the_other() -> None:
    names = first_nodes(PolicyName.ROUND_ROBIN, fleet_of(3), 6)
    assert names == ["p0:80", "p1:80", "p2:80"] * 2


def test_least_loaded_takes_the_one_with_the_fewest_tokens() -> None:
    fleet = fleet_of(3, num_waiting_tokens=500)
    fleet.add("idle", PREFILL)
    assert set(first_nodes(PolicyName.LEAST_LOADED, fleet, 9)) == {"idle:80"}


def test_sticky_stays_whatever_the_load() -> None:
    fleet = fleet_of(4)
    [home] = set(first_nodes(PolicyName.STICKY, fleet, 5, session_key=b"s"))
    fleet.node(home.removesuffix(":80")).work.num_tokens = 10**9
    assert set(first_nodes(PolicyName.STICKY, fleet, 5, session_key=b"s")) == {home}
    assert home not in first_nodes(PolicyName.STICKY, fleet, 5)


def tandem(fleet: Fleet, **parameters: Any) -> TandemPolicy:
    return TandemPolicy(fleet.registry, random.Random(1), TandemParameters(**parameters))


def test_a_turn_follows_its_prefix_wherever_it_was_computed() -> None:
    """A prefix is known by what the router itself sent, and by what a node reports of another
    router's work."""
    fleet = fleet_of(20)
    policy = tandem(fleet)
    turn = request(
        num_prompt_tokens=8000, prefix_blocks=(1, 2, 3, 4, 5, 6, 7), tokens_per_block=1000.0
    )
    first = policy.place(turn).prefills[0]
    again = policy.place(turn)
    assert again.prefills[0] is first
    assert again.num_new_tokens == 1000
    other = fleet.node("p3") if first is not fleet.node("p3") else fleet.node("p4")
    stranger = request(num_prompt_tokens=3000, prefix_blocks=(71, 72, 73), tokens_per_block=1000.0)
    fleet.registry.take_report(other.address, report(PREFILL, sequence=2, recent_prefixes=(73,)))
    assert policy.place(stranger).prefills[0] is other


def test_tools_are_cached_with_the_first_block_and_make_others_forget_nothing() -> None:
    fleet = fleet_of(1)
    policy = tandem(fleet)
    chain = tuple(range(1, 401))
    long = request(num_prompt_tokens=401_000, prefix_blocks=chain, tokens_per_block=1000.0)
    policy.place(long)
    agent = request(
        num_prompt_tokens=101_000,
        num_tool_tokens=100_000,
        prefix_blocks=(7001,),
        tokens_per_block=1000.0,
    )
    assert policy.place(agent).num_new_tokens == 101_000
    assert policy.place(agent).num_new_tokens == 1
    assert policy.place(long).num_new_tokens == 1000


def test_a_restarted_node_has_nothing_cached() -> None:
    fleet = fleet_of(2)
    policy = tandem(fleet)
    turn = request(num_prompt_tokens=2000, prefix_blocks=(1,), tokens_per_block=1000.0)
    first = policy.place(turn).prefills[0]
    fleet.registry.apply_report(first.address, report(PREFILL, epoch=9))
    policy.place(request())
    assert policy.knowledge(fleet.node("p0")).index.match((1,)).best(1, RNG) == []


def test_measurements_teach_speed_and_pace() -> None:
    fleet = fleet_of(2)
    policy = tandem(fleet, prefill_tokens_per_s=1000)
    slow, fast = fleet.node("p0"), fleet.node("p1")
    for _ in range(200):
        for target, factor in ((slow, 3.0), (fast, 1.0)):
            placement = policy.place(request(num_prompt_tokens=1000))
            outcome = served(target, 1000, 0, factor * 0.1)
            policy.observe(request(num_prompt_tokens=1000), placement, outcome)
    ratio = slow.pace.factor / fast.pace.factor
    assert ratio == pytest.approx(3.0, rel=0.2)
    firsts = Counter(policy.place(request(num_prompt_tokens=1000)).prefills[0] for _ in range(20))
    assert firsts[fast] == 20


def test_bursts_never_drive_speed_and_pace_apart() -> None:
    """Prompts of a burst share their steps and take long each, the few between bursts do not. The
    fit must stay within what was seen, and no node far from the others."""
    fleet = fleet_of(2)
    policy = tandem(fleet, prefill_tokens_per_s=1000)
    nodes = fleet.node("p0"), fleet.node("p1")
    for _ in range(100):
        for took_s in (0.01, *(0.5 + 0.2 * i for i in range(12))):
            for target in nodes:
                placement = policy.place(request(num_prompt_tokens=100))
                outcome = served(target, 100, 0, took_s)
                policy.observe(request(num_prompt_tokens=100), placement, outcome)
    fit = policy.knowledge(nodes[0]).fit
    assert 0.01 <= fit.time.seconds(100, 100) <= 2.7
    assert 0.01 <= nodes[0].pace.factor * fit.time.seconds(100, 100) <= 2.7


def test_a_burst_on_a_node_that_restarted_is_not_thought_to_last_long() -> None:
    """It knows no rate yet, and its prompts took as long as the burst."""
    fleet = fleet_of(2, prefill_tokens_per_s=2000.0)
    policy = tandem(fleet, prefill_tokens_per_s=1000)
    old, new = fleet.node("p0"), fleet.node("p1")
    fleet.registry.apply_report(new.address, report(PREFILL, epoch=9))
    new = fleet.node("p1")
    for _ in range(40):
        for target in (old, new):
            placement = policy.place(request(num_prompt_tokens=100))
            policy.observe(request(num_prompt_tokens=100), placement, served(target, 100, 0, 4.0))
    new.work.num_tokens = 4000
    estimator = policy.knowledge(new).estimator
    assert estimator.queue_s(new, fleet.registry.clock()) == pytest.approx(2.0, rel=0.05)


def test_prefill_nodes_that_keep_failing_are_left_out() -> None:
    fleet = fleet_of(2)
    policy = tandem(fleet)
    bad = fleet.node("p0")
    for code in ("resource_exhausted", "unreachable", "unreachable", "timeout"):
        placement = policy.place(request())
        policy.observe(request(), placement, PrefillOutcome(failures=(("p0:80", code),)))
    assert fleet.registry.usable(PREFILL) == [fleet.node("p1")]
    assert bad.health.consecutive_failures == 2, "refusing is not failing"


def test_short_prompts_get_no_prefill_node() -> None:
    placement = tandem(fleet_of(2), short_prompt_tokens=64).place(request(num_prompt_tokens=60))
    assert (placement.prefills, placement.choice) == ((), PrefillChoice.LOCAL)


def test_two_routers_spill_alike() -> None:
    """Nothing is shared, and the same loads lead both away from the same busy home."""
    fleets = [fleet_of(6), fleet_of(6)]
    policies = [tandem(fleet) for fleet in fleets]
    turn = request(
        session_key=b"a session",
        num_prompt_tokens=1100,
        prefix_blocks=(5,),
        tokens_per_block=1000.0,
    )
    homes = [p.place(turn).prefills[0].address for p in policies]
    assert homes[0] == homes[1]
    for fleet in fleets:
        for index in range(6):
            name = f"p{index}"
            waiting = 10**6 if fleet.node(name).address == homes[0] else 1000 * index
            busy = report(PREFILL, sequence=2, num_waiting_tokens=waiting)
            fleet.registry.apply_report(fleet.node(name).address, busy)
    spilled = [p.place(turn) for p in policies]
    assert {p.choice for p in spilled} == {PrefillChoice.SPILL}
    assert spilled[0].prefills[0].address == spilled[1].prefills[0].address != homes[0]


# What nodes say --------------------------------------------------------------------------------


def test_an_outcome_is_read_from_headers() -> None:
    outcome = PrefillOutcome.from_headers(
        [
            (b"x-tandem-prefill-node", b"[::1]:5001"),
            (b"x-tandem-prefill-work", b"prompt=1234;cached=1024;queue=0.5;compute=0.25"),
            (b"x-tandem-prefill-failed", b"a:1=unreachable,[::2]:5=timeout"),
        ]
    )
    assert outcome == PrefillOutcome(
        node="[::1]:5001",
        num_prompt_tokens=1234,
        num_cached_tokens=1024,
        queue_s=0.5,
        compute_s=0.25,
        failures=(("a:1", "unreachable"), ("[::2]:5", "timeout")),
    )
    assert outcome.num_computed_tokens == 210
    assert PrefillOutcome.from_headers([(b"x-tandem-prefill-node", b"local")]) == PrefillOutcome()


@settings(deadline=None)
@given(st.text(alphabet="promtcached=;.,-1e9nainf ", max_size=60))
def test_spoilt_headers_mean_nothing_bad(text: str) -> None:
    outcome = PrefillOutcome.from_headers(
        [(b"x-tandem-prefill-work", text.encode()), (b"x-tandem-prefill-failed", text.encode())]
    )
    assert 0 <= outcome.num_cached_tokens <= outcome.num_prompt_tokens
    assert outcome.compute_s >= 0
