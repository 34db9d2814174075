"""Admission decides who may go on to the nodes, who waits, and what the others are told."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.admission_gate import (
    AdmissionGate,
    GateLimits,
    Refusal,
    shed_probability,
)
from router.admission.cluster_load import ClusterLoad, ClusterLoads
from router.admission.retry_after import RetryAfter
from router.admission.ticket import Ticket
from router.admission.token_bucket import TokenBucket
from router.errors import NoNodeAvailable, Overloaded, RateLimited
from router.nodes.address import NodeRole
from router.nodes.node import Node
from router.nodes.partners import decodes_of, prefills_of
from router.nodes.registry import NodeRegistry
from router.placement.policy import Placement
from router.request.info import RequestInfo
from router.request.tenants import Priority, Tenant
from tests.router.cluster import Cluster, RunningRouter, eventually
from tests.router.factories import Fleet, ManualClock, address, report, request
from tests.router.fakes import never_answer, stream_tokens

BATCH, STANDARD, INTERACTIVE = Priority.BATCH, Priority.STANDARD, Priority.INTERACTIVE


class Gate:
    """A gate under a manual clock. `started` holds the ids of requests in the order they went,
    `refused` those that had a place in the line."""

    def __init__(self, slots: int = 1, **limits: Any) -> None:
        self.clock = ManualClock()
        self.started: list[str] = []
        self.refused: list[tuple[str, Overloaded]] = []
        self.gate = AdmissionGate(
            limits=GateLimits(slots_per_node=slots, **limits),
            num_nodes=lambda: 1,
            clock=self.clock,
            rng=random.Random(3),
        )
        self._names = map(str, itertools.count())

    def offer(self, name: str = "", **fields: Any) -> Any:
        name = name or next(self._names)
        info = request(**{"request_id": name, "num_prompt_tokens": 100, **fields})
        return self.gate.offer(
            info,
            lambda: self.started.append(name),
            lambda error: self.refused.append((name, error)),
        )

    def run(self, seconds: float = 0.0) -> str:
        """Returns the one that goes when a slot becomes free."""
        self.clock.now += seconds
        self.gate.free()
        return self.started[-1]


def tenant(name: str, **fields: Any) -> Tenant:
    return Tenant(name=name, **fields)


# Token buckets ---------------------------------------------------------------------------------


def test_a_bucket_allows_a_burst_then_its_rate() -> None:
    bucket = TokenBucket(rate=2, burst=4)
    for _ in range(4):
        assert bucket.wait_s(0) == 0
        bucket.take(1)
    assert 0 < bucket.wait_s(0) < 0.01
    assert bucket.wait_s(1) == 0


def test_a_request_larger_than_the_bucket_is_served_and_paid_for_later() -> None:
    bucket = TokenBucket(rate=10, burst=20)
    assert bucket.wait_s(0) == 0
    bucket.take(120)
    assert bucket.wait_s(0) == pytest.approx(10, abs=0.01)
    assert bucket.wait_s(9) > 0
    assert bucket.wait_s(10.1) == 0


@settings(deadline=None, max_examples=50)
@given(
    st.floats(0.1, 50),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 30)), max_size=60),
)
def test_the_long_run_rate_holds(rate: float, wishes: list[tuple[float, float]]) -> None:
    bucket = TokenBucket(rate=rate, burst=rate * 10)
    now, taken, largest = 0.0, 0.0, 0.0
    for pause, amount in wishes:
        now += pause
        if bucket.wait_s(now) == 0:
            bucket.take(amount)
            taken, largest = taken + amount, max(largest, amount)
    assert taken <= rate * (10 + now) + largest + 1e-6


# Tenants ---------------------------------------------------------------------------------------


def test_a_tenant_over_its_request_rate_is_told_when_to_come_back() -> None:
    gate = Gate(slots=1000)
    busy = tenant("busy", requests_per_s=2)
    for _ in range(20):
        gate.offer(tenant=busy)
    with pytest.raises(RateLimited, match="busy has used up its requests") as refused:
        gate.offer(tenant=busy)
    assert refused.value.status == 429
    assert refused.value.retry_after_s == 1
    gate.offer(tenant=tenant("other", requests_per_s=2))
    gate.clock.now += 0.6
    gate.offer(tenant=busy)
    assert gate.gate.refusals[Refusal.RATE_LIMITED] == 1


def test_tokens_count_prompt_and_longest_answer() -> None:
    gate = Gate(slots=1000)
    small = tenant("small", tokens_per_s=100)
    gate.offer(tenant=small, num_prompt_tokens=1000, max_tokens=1000)
    with pytest.raises(RateLimited, match="tokens") as refused:
        gate.offer(tenant=small)
    assert 8 <= (refused.value.retry_after_s or 0) <= 12, "1000 tokens of debt at 100 a second"


def test_every_answer_counts() -> None:
    gate = Gate(slots=1000)
    small = tenant("small", tokens_per_s=100)
    gate.offer(tenant=small, num_prompt_tokens=1, max_tokens=100, num_answers=20)
    with pytest.raises(RateLimited, match="tokens") as refused:
        gate.offer(tenant=small)
    assert 8 <= (refused.value.retry_after_s or 0) <= 12, "2000 tokens, and a burst of 1000"


async def test_what_nobody_answers_costs_no_tokens() -> None:
    gate = Gate(slots=1, max_waiting=1).gate
    small = tenant("small", tokens_per_s=1)
    huge = request(tenant=small, num_prompt_tokens=9, max_tokens=1 << 30)
    with pytest.raises(NoNodeAvailable):
        async with Ticket(gate, huge):
            raise NoNodeAvailable("nobody")
    async with Ticket(gate, huge) as ticket:
        ticket.refused()
    async with Ticket(gate, request()):
        gate.offer(request(request_id="waits"), lambda: None, lambda error: None)
        with pytest.raises(Overloaded):
            await Ticket(gate, huge).__aenter__()
        late = replace(huge, ttft_deadline_s=1e-3)
        gate.withdraw(next(iter(gate.line)))
        with pytest.raises(Overloaded):
            await Ticket(gate, late).__aenter__()
    async with Ticket(gate, huge):
        pass
    with pytest.raises(RateLimited):
        gate.check_rates(huge)


def test_what_comes_back_late_changes_nothing_of_new_limits() -> None:
    gate = Gate(slots=1000)
    old, new = tenant("t", tokens_per_s=1), tenant("t", tokens_per_s=2)
    huge = {"num_prompt_tokens": 1000, "max_tokens": 1000}
    gate.offer(tenant=old, **huge)
    gate.offer(tenant=new, **huge)
    gate.gate.give_back(request(tenant=old, **huge))
    with pytest.raises(RateLimited):
        gate.offer(tenant=new)


def test_replicas_grant_their_share_and_a_fifth() -> None:
    gate = Gate(slots=1000, num_routers=4)
    shared = tenant("shared", requests_per_s=100)
    with pytest.raises(RateLimited):
        for _ in range(1000):
            gate.offer(tenant=shared)
    assert len(gate.started) == pytest.approx(100 / 4 * 1.2 * 10, abs=1)


def test_a_changed_limit_holds_at_once() -> None:
    gate = Gate(slots=1000)
    with pytest.raises(RateLimited):
        for _ in range(100):
            gate.offer(tenant=tenant("t", requests_per_s=1))
    gate.offer(tenant=tenant("t", requests_per_s=5))


# The line --------------------------------------------------------------------------------------


def test_requests_go_at_once_while_there_is_room() -> None:
    gate = Gate(slots=3)
    for name in "abc":
        assert gate.offer(name) is None
    assert gate.offer("d") is not None
    assert gate.started == ["a", "b", "c"]
    assert gate.run() == "d"
    assert gate.gate.num_started == 3


def test_better_classes_go_first() -> None:
    gate = Gate()
    gate.offer("first")
    gate.offer("batch", priority=BATCH)
    gate.offer("standard")
    gate.offer("interactive", priority=INTERACTIVE)
    assert [gate.run() for _ in range(3)] == ["interactive", "standard", "batch"]


def test_nobody_waits_for_ever() -> None:
    """A batch request is, after 20 s, in the first class, with the earliest deadline."""
    gate = Gate(wait_s=1000)
    gate.offer("first")
    gate.offer("batch", priority=BATCH)
    gone = []
    for _ in range(12):
        gate.offer(priority=INTERACTIVE)
        gone.append(gate.run(2.0))
    assert gone.index("batch") == 9


def test_the_earliest_deadline_goes_first_in_a_class() -> None:
    gate = Gate()
    gate.offer("first")
    gate.offer("patient", ttft_deadline_s=30)
    gate.offer("urgent", ttft_deadline_s=2)
    gate.offer("usual")
    assert [gate.run() for _ in range(3)] == ["urgent", "patient", "usual"]


def test_a_flood_of_one_tenant_does_not_stand_before_another() -> None:
    gate = Gate()
    gate.offer("first")
    for i in range(100):
        gate.offer(f"flood-{i}", tenant=tenant("flood"))
    for i in range(5):
        gate.offer(f"calm-{i}", tenant=tenant("calm"))
    gone = [gate.run() for _ in range(11)]
    assert sum(name.startswith("calm") for name in gone) == 5


def test_a_full_line_refuses() -> None:
    gate = Gate(max_waiting=2)
    for _ in range(3):
        gate.offer()
    with pytest.raises(Overloaded, match="2 requests are waiting") as refused:
        gate.offer()
    assert refused.value.status == 503
    assert 1 <= (refused.value.retry_after_s or 0) <= 30


def refused_after_s(gate: Gate, count: int) -> list[int]:
    """Returns what so many are told who find the line full."""
    told = []
    for _ in range(count):
        with pytest.raises(Overloaded) as refused:
            gate.offer()
        told.append(refused.value.retry_after_s or 0)
    return told


def test_a_burst_is_told_to_come_back_one_after_the_other() -> None:
    """Nothing is known of the pace yet: 64 slots are thought to take a second each."""
    gate = Gate(slots=64, max_waiting=1025)
    for _ in range(1089):
        gate.offer()
    told = refused_after_s(gate, 911)
    assert told[0] == 1 and 11 <= told[-1] <= 18
    assert max(told.count(second) for second in told) < 200
    assert sum(later >= sooner for sooner, later in itertools.pairwise(told)) > 600


def test_who_is_refused_is_told_what_the_line_says() -> None:
    """One slot comes free each 50 ms, so 400 refused clients come back within 20 s; those who do
    as they were told find a place."""
    gate = Gate(slots=8, max_waiting=100, wait_s=0)
    for _ in range(108):
        gate.offer()
    for _ in range(100):
        gate.run(0.05)
        gate.offer()
    told = sorted(refused_after_s(gate, 400))
    assert 20 * 0.7 <= told[-1] <= 20 * 1.3
    welcome, started_at = 0, gate.clock.now
    for after_s in told:
        while gate.clock.now < started_at + after_s:
            gate.run(0.05)
        welcome += len(gate.gate.line) < 100
        if len(gate.gate.line) < 100:
            gate.offer()
    assert welcome > 360


def test_a_line_that_stands_still_is_told_to_be_slow() -> None:
    gate = Gate(slots=1, max_waiting=1)
    gate.offer()
    gate.offer()
    gate.clock.now += 40
    [told] = refused_after_s(gate, 1)
    assert 32 <= told <= 48


def test_one_who_could_not_be_served_in_time_is_refused_at_once() -> None:
    gate = Gate(wait_s=1000)
    gate.offer()
    for _ in range(40):
        gate.offer()
    for _ in range(30):
        gate.run(2.0)
    with pytest.raises(Overloaded, match="longer than this one may") as refused:
        gate.offer(ttft_deadline_s=5)
    assert (refused.value.retry_after_s or 0) > 3
    gate.offer(ttft_deadline_s=60)


def test_who_waits_in_vain_is_refused_as_soon_as_that_is_sure() -> None:
    """A burst fills the line before any pace is known: ten go on in a second, and 600 in time."""
    gate = Gate(slots=64)
    end = gate.clock.now + 60.0
    for _ in range(64 + 1024):
        gate.offer()
    for _ in range(50):
        gate.run(0.1)
    assert len(gate.gate.line) == pytest.approx(600 - 50, abs=12)
    assert gate.gate.refusals[Refusal.TOO_LATE] == len(gate.refused)
    assert all(error.status == 503 and error.retry_after_s for _, error in gate.refused)
    kept = set(map(str, range(64 + 1024))) - {name for name, _ in gate.refused}
    while gate.gate.line:
        gate.run(0.1)
    assert gate.clock.now <= end, "all others go on in time"
    assert set(gate.started) == kept


@pytest.mark.parametrize(("seconds", "at_once"), [(1.6, 16), (4.0, 64), (0.1, 1)])
def test_slots_that_come_free_together_refuse_nobody_who_would_be_in_time(
    seconds: float, at_once: int
) -> None:
    gate = Gate(slots=64, wait_s=50)
    count = int(45 / seconds) * at_once
    for _ in range(64 + min(count, 900)):
        gate.offer()
    while gate.gate.line:
        gate.clock.now += seconds
        for _ in range(at_once):
            gate.gate.free()
    assert not gate.refused


def test_a_node_that_stood_still_for_a_moment_refuses_nobody() -> None:
    gate = Gate(slots=64)
    for _ in range(64 + 900):
        gate.offer()
    for pause in (0.0, 8.0, 0.0, 8.0):
        gate.clock.now += pause
        for _ in range(200):
            if gate.gate.line:
                gate.run(0.025)
    assert not gate.refused


def test_a_flood_is_refused_its_own_requests() -> None:
    """Neither another tenant's few nor those that an earlier class or deadline puts in front."""
    gate = Gate(slots=64)
    for i in range(64 + 900):
        gate.offer(f"flood-{i}", tenant=tenant("flood"))
    for i in range(60):
        gate.offer(f"calm-{i}", tenant=tenant("calm"))
    for i in range(40):
        gate.offer(f"first-{i}", tenant=tenant("flood"), priority=INTERACTIVE)
    for _ in range(60):
        gate.run(0.1)
    assert len(gate.refused) > 300
    assert all(name.startswith("flood") for name, _ in gate.refused)


def test_a_placement_that_comes_too_late_is_refused() -> None:
    gate = Gate().gate
    placement = Placement(Node(address("d")), queue_s=5.0, ttft_s=8.0)
    gate.check_placement(request(ttft_deadline_s=10), placement, waited_s=1.0)
    with pytest.raises(Overloaded, match="about 8 s"):
        gate.check_placement(request(ttft_deadline_s=10), placement, waited_s=3.0)


def test_without_a_deadline_only_the_wait_counts() -> None:
    gate = Gate(wait_s=10).gate
    long_prompt = Placement(Node(address("d")), queue_s=5.0, ttft_s=500.0)
    gate.check_placement(request(), long_prompt, waited_s=4.0)
    with pytest.raises(Overloaded, match="about 5 s"):
        gate.check_placement(request(), long_prompt, waited_s=6.0)


def test_batch_requests_are_shed_as_the_line_grows() -> None:
    assert shed_probability(0.0) == 0
    assert shed_probability(0.1) < 0.01
    assert shed_probability(0.35) == 1
    gate = Gate(max_waiting=10)
    for _ in range(6):
        gate.offer()
    with pytest.raises(Overloaded, match="batch"):
        gate.offer(priority=BATCH)
    gate.offer()


def test_retry_after_is_bounded_and_spread() -> None:
    after = RetryAfter(random.Random(1))
    assert {after.seconds(0.01) for _ in range(50)} == {1}
    assert max(after.seconds(1e9) for _ in range(50)) == 60
    assert len({after.seconds(15) for _ in range(200)}) >= 5


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(["offer", "free", "withdraw"]), max_size=80), st.integers(1, 4))
def test_slots_are_never_exceeded_nor_lost(moves: list[str], slots: int) -> None:
    gate = Gate(slots=slots)
    waiting: list[Any] = []
    for move in moves:
        if move == "offer":
            waiting.append(gate.offer())
        elif move == "free" and gate.gate.num_started:
            gate.gate.free()
        elif move == "withdraw" and waiting and (last := waiting.pop()) is not None:
            gate.gate.withdraw(last)
        assert gate.gate.num_started <= slots
        assert not len(gate.gate.line) or gate.gate.num_started == slots


# Tickets ---------------------------------------------------------------------------------------


def real_gate(**limits: Any) -> AdmissionGate:
    clock = asyncio.get_running_loop().time
    return AdmissionGate(
        limits=GateLimits(slots_per_node=1, **limits),
        num_nodes=lambda: 1,
        clock=clock,
        rng=random.Random(1),
    )


async def test_a_ticket_waits_for_its_turn_and_gives_the_slot_back() -> None:
    gate = real_gate()

    async def hold(info: RequestInfo, until: asyncio.Event) -> None:
        async with Ticket(gate, info):
            await until.wait()

    done = asyncio.Event()
    async with Ticket(gate, request()) as first:
        second = asyncio.create_task(hold(request(), done))
        await eventually(lambda: len(gate.line) == 1)
        first.first_byte()
        await eventually(lambda: not len(gate.line))
        assert gate.num_started == 1
    assert gate.num_started == 1, "the first had given its slot back before"
    done.set()
    await second
    assert gate.num_started == 0


async def test_whoever_leaves_the_line_is_forgotten() -> None:
    gate = real_gate()
    async with Ticket(gate, request()):
        waiting = asyncio.create_task(Ticket(gate, request()).__aenter__())
        await eventually(lambda: len(gate.line) == 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not len(gate.line)
    assert gate.num_started == 0


async def test_the_deadline_ends_the_wait() -> None:
    gate = real_gate(wait_s=0.05)
    async with Ticket(gate, request()):
        with pytest.raises(Overloaded, match=r"within 0\.05 s"):
            async with Ticket(gate, request()):
                pass
        assert not len(gate.line)
    assert gate.refusals[Refusal.TOO_LATE] == 1


async def test_one_refused_in_the_line_is_given_its_tokens_back() -> None:
    gate = real_gate(wait_s=30)
    poor = tenant("poor", tokens_per_s=1)
    async with Ticket(gate, request()):
        entering = asyncio.create_task(
            Ticket(gate, request(tenant=poor, max_tokens=1000)).__aenter__()
        )
        await eventually(lambda: len(gate.line) == 1)
        [waiting] = gate.line
        gate.withdraw(waiting)
        waiting.refuse(Overloaded("too late", retry_after_s=3))
        with pytest.raises(Overloaded, match="too late"):
            await entering
    assert gate.num_started == 0
    gate.check_rates(request(tenant=poor))


async def test_what_a_busy_router_came_to_late_has_that_less_to_wait() -> None:
    gate = real_gate(wait_s=60)
    async with Ticket(gate, request()):
        with pytest.raises(Overloaded, match="within 60 s"):
            async with Ticket(gate, request(), waited_s=59.7):
                pass
        assert not len(gate.line)
    assert gate.refusals[Refusal.TOO_LATE] == 1
    async with Ticket(gate, request(), waited_s=20) as ticket:
        assert 39 < ticket.time_left_s() <= 40
    assert gate.num_started == 0


# Through a router ------------------------------------------------------------------------------


async def test_a_client_hears_of_a_full_router_in_the_form_of_the_api(cluster: Cluster) -> None:
    node = await cluster.decode(handler=never_answer())
    router = await cluster.router(node, max_prefills_per_node=1, max_waiting_requests=1)
    body = {"model": "demo", "prompt": "hello"}
    open_ones = [asyncio.create_task(router.text(body)) for _ in range(2)]
    await eventually(lambda: router.metric("tandem_router_waiting_requests", model="demo") == 1)
    async with router.post(body) as response:
        assert response.status == 503
        assert 1 <= int(response.headers["retry-after"]) <= 30
        assert (await response.json())["error"]["code"] == "overloaded"
    assert router.metric("tandem_router_refusals_total", model="demo", reason="line_full") == 1
    assert router.metric("tandem_router_prefilling_requests", model="demo") == 1
    for task in open_ones:
        task.cancel()
    await asyncio.wait(open_ones)


async def test_prompts_that_no_node_can_take_put_nobody_off(cluster: Cluster) -> None:
    """Each counted for what 8 MB of text would take: half an hour on every node."""
    may_refuse = asyncio.Event()

    async def refuse_long_ones(incoming: web.Request) -> web.StreamResponse:
        if len(await incoming.read()) < 1 << 20:
            return await stream_tokens(3)(incoming)
        await may_refuse.wait()
        return web.json_response({"error": {"message": "the context is 4096"}}, status=400)

    node, prefill = await cluster.decode(handler=refuse_long_ones), await cluster.prefill()
    for one in (node, prefill):
        await one.status.change(max_model_len=4096, prefill_tokens_per_s=1000.0)
    router = await cluster.router(node, prefill, max_body_bytes=16 << 20)
    endless = {"model": "demo", "prompt": "x" * (8 << 20), "stream": True}
    long_ones = [asyncio.create_task(status_of(router, endless)) for _ in range(3)]
    await eventually(lambda: node.num_open == 3)
    [decode] = router.services.registry.nodes(NodeRole.DECODE)
    [computes] = router.services.registry.nodes(NodeRole.PREFILL)
    assert computes.work.num_tokens <= 3 * 4096
    assert decode.work.num_tokens <= 3 * 2 * 4096
    short = {"model": "demo", "prompt": "hello", "stream": True}
    assert [await status_of(router, short) for _ in range(20)] == [200] * 20
    may_refuse.set()
    assert await asyncio.gather(*long_ones) == [400] * 3
    assert sum(router.services.gates.of("demo").refusals.values()) == 0


async def status_of(router: RunningRouter, body: object) -> int:
    async with router.post(body) as response:
        await response.read()
        return int(response.status)


def test_the_load_that_answers_tell_is_summed_up_once_a_moment() -> None:
    """A look at all nodes for each answer would be a part of the work of a large cluster."""
    fleet = Fleet()
    where = fleet.add("a", num_waiting_requests=2, num_total_blocks=10, num_free_blocks=5).address
    loads = ClusterLoads(fleet.registry)
    first = loads.of("demo", 3)
    assert (first.kv_usage, first.num_waiting) == (0.5, 5)
    fleet.registry.apply_report(where, report(sequence=2, num_waiting_requests=9))
    assert loads.of("demo", 4).num_waiting == 6
    fleet.clock.now += 0.2
    assert loads.of("demo", 0).num_waiting == 9
    assert loads.of("another", 1).num_waiting == 1
    fleet.add("p", NodeRole.PREFILL, model_name="pool", num_waiting_requests=4)
    fleet.clock.now += 0.2
    assert loads.of("demo", 0).num_waiting == 13, "its prompts wait there, whatever its name"


NAMED = st.tuples(st.sampled_from("ab"), st.sampled_from(["", "b", "c"]), st.sampled_from("xy"))


@given(st.lists(NAMED, max_size=4), st.lists(NAMED, max_size=4))
def test_one_look_gives_the_load_of_each_model(
    decodes: list[tuple[str, str, str]], prefills: list[tuple[str, str, str]]
) -> None:
    """A look for each of two hundred models would take more than there is."""
    fleet = Fleet()
    for role, nodes in ((NodeRole.DECODE, decodes), (NodeRole.PREFILL, prefills)):
        for number, (model, alias, weights) in enumerate(nodes):
            fleet.add(
                f"{role}-{number}",
                role,
                model_name=model,
                model_aliases=(alias,) if alias else (),
                fingerprint=weights,
                num_waiting_requests=1 << (number + 8 * (role is NodeRole.PREFILL)),
                num_total_blocks=10,
                num_free_blocks=number,
            )
    all_decodes, all_prefills = map(fleet.registry.usable, (NodeRole.DECODE, NodeRole.PREFILL))
    loads = ClusterLoads(fleet.registry)
    look = NodeRegistry.usable
    with patch.object(NodeRegistry, "usable", autospec=True, side_effect=look) as looks:
        found = {model: loads.of(model, 5) for model in ("", "a", "b", "c")}
    assert looks.call_count == 2
    for model, load in found.items():
        own = decodes_of(model, all_decodes)
        nodes = [*own, *prefills_of(model, all_prefills, all_decodes)]
        waiting = sum(node.report.num_waiting_requests for node in nodes if node.report)
        free = sum(node.report.num_free_blocks for node in own if node.report)
        usage = 1 - free / (10 * len(own)) if own else 0.0
        assert load == ClusterLoad(usage, waiting + 5), model
