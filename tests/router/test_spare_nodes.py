"""Capacity that nothing else uses, found in the nodes' reports and in what this router does."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.contracts.request_spec import IDLE_PRIORITY
from router.admission.admission_gate import AdmissionGate, GateLimits
from router.batches.lines import input_line
from router.errors import NoNodeAvailable, Overloaded
from router.nodes.address import NodeRole
from router.nodes.node import Node
from router.placement.candidates.spare_nodes import SpareNodes
from router.placement.policy import Placement, PrefillChoice
from router.placement.tandem_policy import TandemPolicy
from router.request.info import RequestInfo
from router.request.tenants import Priority
from tests.router.factories import Fleet, report, request

DECODE, PREFILL = NodeRole.DECODE, NodeRole.PREFILL


def idle(**fields: Any) -> RequestInfo:
    return request(**{"priority": Priority.IDLE, "num_prompt_tokens": 100, **fields})


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.add("d", num_total_blocks=1000, num_free_blocks=1000, block_size=16)
    for i in range(4):
        fleet.add(f"p{i}", PREFILL)
    return fleet


@pytest.fixture
def policy(fleet: Fleet) -> TandemPolicy:
    return TandemPolicy(fleet.registry, random.Random(1))


def wait(fleet: Fleet, spare: SpareNodes, seconds: float = 11.0) -> None:
    """Lets time pass in which reports come and nodes are looked at."""
    for _ in range(round(seconds * 5)):
        fleet.clock.now += 0.2
        for node in fleet.registry.all_nodes():
            node.reported_at = fleet.clock.now
        spare.look()


def tell(fleet: Fleet, name: str, **fields: Any) -> None:
    node = fleet.node(name)
    assert node.report is not None
    role, sequence = node.address.role, node.report.sequence + 1
    fleet.registry.apply_report(node.address, report(role, sequence=sequence, **fields))


def names(nodes: list[Node]) -> set[str]:
    return {node.address.target for node in nodes}


def prefills(fleet: Fleet, spare: SpareNodes) -> set[str]:
    return names(spare.prefills(fleet.registry.nodes(PREFILL)))


def test_nothing_is_spare_before_the_window_is_over(fleet: Fleet, policy: TandemPolicy) -> None:
    wait(fleet, policy.spare, 9)
    assert not prefills(fleet, policy.spare)
    assert policy.spare.free_tokens("demo") == 0
    with pytest.raises(NoNodeAvailable, match="no other request uses"):
        policy.place(idle())
    wait(fleet, policy.spare, 2)
    assert len(prefills(fleet, policy.spare)) == 3
    assert policy.spare.free_tokens("demo") == 3 * 2048


def test_prefill_nodes_of_another_name_are_spare_as_well() -> None:
    fleet = Fleet()
    fleet.add("d", fingerprint="w", num_total_blocks=100, num_free_blocks=100, block_size=64)
    for name in ("p0", "p1", "p2", "p3"):
        fleet.add(name, PREFILL, model_name="pool", fingerprint="w")
    spare = TandemPolicy(fleet.registry, random.Random(1)).spare
    wait(fleet, spare)
    assert spare.free_tokens("demo") == 3 * 2048


def test_as_many_stay_free_as_were_needed_and_a_reserve(fleet: Fleet, policy: TandemPolicy) -> None:
    wait(fleet, policy.spare)
    for name in ("p0", "p1"):
        tell(fleet, name, num_running_requests=1)
    policy.spare.look()
    assert len(prefills(fleet, policy.spare)) == 1
    for name in ("p0", "p1"):
        tell(fleet, name)
    wait(fleet, policy.spare, 5)
    assert len(prefills(fleet, policy.spare)) == 1
    wait(fleet, policy.spare, 6)
    assert len(prefills(fleet, policy.spare)) == 3


def test_requests_of_batches_are_no_use(fleet: Fleet, policy: TandemPolicy) -> None:
    """Neither those of this router, on their way or reported, nor those of another one."""
    wait(fleet, policy.spare)
    placement = policy.place(idle())
    assert placement.is_idle
    [node] = placement.prefills[:1]
    with placement.hold_decode(), placement.hold_prefill():
        wait(fleet, policy.spare)
        assert not node.serves_others
        tell(fleet, node.address.target[:-3], num_running_requests=2, num_idle_requests=2)
        tell(fleet, "d", num_running_requests=3, num_idle_requests=3)
        wait(fleet, policy.spare)
        assert len(prefills(fleet, policy.spare)) == 3
    tell(fleet, "p0", num_running_requests=2, num_idle_requests=1)
    assert fleet.node("p0").serves_others


def test_a_short_use_between_two_looks_counts(fleet: Fleet, policy: TandemPolicy) -> None:
    wait(fleet, policy.spare)
    with fleet.node("p0").hold_tokens(10):
        pass
    policy.spare.look()
    assert len(prefills(fleet, policy.spare)) == 2


def test_a_spare_node_takes_one_step_of_prompts(fleet: Fleet, policy: TandemPolicy) -> None:
    wait(fleet, policy.spare)
    held = []
    for _ in range(3):
        placement = policy.place(idle(num_prompt_tokens=5000))
        holding = placement.hold_prefill()
        holding.__enter__()
        held.append((placement, holding))
    assert len({one.prefills[0] for one, _ in held}) == 3
    # The decode node is quiet, and takes what these have no room for.
    assert policy.place(idle()).choice is PrefillChoice.LOCAL
    tell(fleet, "d", num_running_requests=1)
    policy.spare.look()
    assert policy.spare.free_tokens("demo") == 0
    with pytest.raises(NoNodeAvailable):
        policy.place(idle())


def test_one_prefill_node_stays_free_and_a_quiet_decode_node_computes() -> None:
    fleet = Fleet()
    fleet.add("d", num_total_blocks=1000, num_free_blocks=1000, block_size=16)
    fleet.add("p", PREFILL)
    policy = TandemPolicy(fleet.registry, random.Random(1))
    wait(fleet, policy.spare)
    placement = policy.place(idle())
    assert (placement.choice, placement.prefills) == (PrefillChoice.LOCAL, ())
    with fleet.node("d").hold_request():
        pass
    policy.spare.look()
    with pytest.raises(NoNodeAvailable):
        policy.place(idle())
    tell(fleet, "d", num_total_blocks=1000, num_free_blocks=1000, slack_tokens_per_s=900.0)
    assert policy.place(idle()).choice is PrefillChoice.LOCAL


def test_few_run_where_prompts_of_others_were_computed_in_the_room_of_steps(
    fleet: Fleet, policy: TandemPolicy
) -> None:
    """Each makes the steps of others longer, which leaves less room for their prompts."""
    spare, room = policy.spare, {"num_total_blocks": 1000, "num_free_blocks": 1000}
    room["slack_tokens_per_s"] = 900
    wait(fleet, spare)
    tell(fleet, "d", **room)
    with fleet.node("d").hold_request():
        spare.look()
        assert spare.num_rooms("demo") == 32, "it has decoded for others"
        with fleet.node("d").hold_tokens(500, is_idle=True):
            spare.look()
            assert spare.num_rooms("demo") == 32
        with fleet.node("d").hold_tokens(500):
            pass
        spare.look()
        assert spare.num_rooms("demo") == 6
        tell(fleet, "d", **room, num_running_requests=7, num_idle_requests=6)
        assert not spare.decodes(fleet.registry.nodes(DECODE), 0)
        wait(fleet, spare, 9)
        assert spare.num_rooms("demo") == 0
        wait(fleet, spare, 2)
        assert spare.num_rooms("demo") == 26, "no prompt has come for ten seconds"


@pytest.mark.parametrize(
    "fields",
    [
        {"num_free_blocks": 300},
        {"num_free_blocks": 900, "num_waiting_requests": 1, "num_running_requests": 4},
        {"num_free_blocks": 900, "num_running_requests": 32, "num_idle_requests": 32},
    ],
)
def test_a_decode_node_without_room_takes_none(
    fleet: Fleet, policy: TandemPolicy, fields: dict[str, int]
) -> None:
    wait(fleet, policy.spare)
    tell(fleet, "d", num_total_blocks=1000, block_size=16, **fields)
    assert policy.spare.free_tokens("demo") == 0
    with pytest.raises(NoNodeAvailable):
        policy.place(idle())


def test_nothing_of_a_batch_begins_where_anybody_waits() -> None:
    seen: list[RequestInfo] = []
    gate = AdmissionGate(
        limits=GateLimits(slots_per_node=1),
        num_nodes=lambda: 1,
        clock=lambda: 0.0,
        rng=random.Random(1),
        on_request=seen.append,
    )
    assert gate.offer(idle(), lambda: None, lambda error: None) is None
    with pytest.raises(Overloaded, match="idle"):
        gate.offer(idle(), lambda: None, lambda error: None)
    assert not seen
    gate.free()
    assert gate.offer(request(), lambda: None, lambda error: None) is None
    assert len(seen) == 1


def test_router_and_engine_have_one_lowest_priority() -> None:
    assert input_line._IDLE_PRIORITY == IDLE_PRIORITY


def test_a_placement_for_others_is_no_idle_one(policy: TandemPolicy) -> None:
    found: Placement = policy.place(request(num_prompt_tokens=10))
    assert not found.is_idle
