"""A node that changes its role is followed, wherever the node list has it."""

from __future__ import annotations

from typing import Any

import pytest

from router.nodes.address import NodeAddress, NodeRole
from router.nodes.node import Node, NodeState
from router.nodes.registry import ReportOutcome
from router.nodes.report import NodeReport
from tandem_pb.node_pb2 import NODE_ROLE_DECODE, NODE_ROLE_PREFILL, NodeLoad
from tests.router.cluster import Cluster, RunningRouter, eventually
from tests.router.factories import Fleet, address, report

PREFILL, DECODE = NodeRole.PREFILL, NodeRole.DECODE
AS_PREFILL = NodeAddress(PREFILL, "x:90", "x:90")
AS_DECODE = NodeAddress(DECODE, "x:80", "x:90")


def take(fleet: Fleet, listed: NodeAddress, role: NodeRole, epoch: int) -> ReportOutcome:
    return fleet.registry.apply_report(listed, report(role, epoch=epoch, http_port=80))


def only(fleet: Fleet) -> Node:
    [node] = fleet.registry.all_nodes()
    return node


@pytest.mark.parametrize("listed", [AS_PREFILL, AS_DECODE])
def test_a_node_is_where_it_says_whatever_lists_it(listed: NodeAddress) -> None:
    fleet = Fleet()
    registry = fleet.registry
    registry.set_members([listed])
    places = {PREFILL: AS_PREFILL, DECODE: AS_DECODE}
    for epoch, role in enumerate((PREFILL, DECODE, DECODE, PREFILL, DECODE), start=1):
        other = PREFILL if role is DECODE else DECODE
        version = registry.version
        outcome = take(fleet, listed, role, epoch)
        assert outcome is (ReportOutcome.RESTARTED if epoch > 1 else ReportOutcome.APPLIED)
        node = only(fleet)
        assert node.address == places[role] and node.listed == listed
        assert registry.usable(role) == [node] == registry.nodes(role)
        assert registry.nodes(other) == [] and registry.find(other, places[other].target) is None
        assert registry.find(role, places[role].target) is node
        assert registry.version > version
    assert take(fleet, listed, PREFILL, 1) is ReportOutcome.OUTDATED, "a role that it had before"
    assert only(fleet).address == AS_DECODE


def test_what_belongs_to_its_life_before_stays_there() -> None:
    fleet = Fleet()
    fleet.registry.set_members([AS_DECODE])
    take(fleet, AS_DECODE, DECODE, 1)
    before = only(fleet)
    with before.hold_request():
        take(fleet, AS_DECODE, PREFILL, 2)
        assert only(fleet) is not before and only(fleet).work.num_requests == 0
        assert not fleet.registry.record_failure(before)
        assert not fleet.registry.is_member(before)


def test_discovery_and_silence_know_it_by_its_entry() -> None:
    fleet = Fleet()
    registry = fleet.registry
    registry.set_members([AS_PREFILL])
    take(fleet, AS_PREFILL, DECODE, 1)
    node = only(fleet)
    assert registry.is_connected(AS_PREFILL)
    registry.set_members([AS_PREFILL, address("more")], leaving=[AS_PREFILL])
    assert registry.nodes(DECODE)[0] is node and node.leaving
    assert len(registry.nodes(DECODE)) == 2
    registry.mark_disconnected(AS_PREFILL)
    assert not node.connected
    assert registry.is_member(node)
    fleet.clock.now += 11
    assert registry.state(node) is NodeState.DOWN
    registry.set_members([])
    assert not registry.is_member(node)


def test_a_node_in_both_lists_counts_once() -> None:
    fleet = Fleet()
    registry = fleet.registry
    registry.set_members([AS_PREFILL, AS_DECODE])
    for epoch, role in enumerate((PREFILL, DECODE, PREFILL), start=1):
        listed, other = (AS_PREFILL, AS_DECODE) if role is PREFILL else (AS_DECODE, AS_PREFILL)
        version, was_used = registry.version, epoch > 1
        assert take(fleet, other, role, epoch) is ReportOutcome.LISTED_TWICE
        assert (registry.version > version) == was_used, "who chose among nodes looks again"
        take(fleet, listed, role, epoch)
        assert [node.address for node in registry.usable(role)] == [listed]
        assert registry.usable(PREFILL if role is DECODE else DECODE) == []


def test_a_node_of_one_role_is_not_followed() -> None:
    fleet = Fleet()
    fleet.registry.set_members([AS_PREFILL])
    outcome = fleet.registry.apply_report(AS_PREFILL, report(DECODE))
    assert outcome is ReportOutcome.WRONG_ROLE
    load = NodeLoad(role=NODE_ROLE_DECODE, epoch=1, sequence=1, http_port=70_000)
    outcome = fleet.registry.apply_report(AS_PREFILL, NodeReport.from_message(load))
    assert outcome is ReportOutcome.WRONG_ROLE


# The call of operators -------------------------------------------------------------------------


async def switch(router: RunningRouter, **body: Any) -> tuple[int, Any]:
    async with router.client.post(f"{router.url}/switch_role", json=body) as response:
        return response.status, await response.json()


async def test_a_node_is_asked_and_followed(cluster: Cluster) -> None:
    changes, stays = await cluster.decode("changes"), await cluster.decode("stays")
    router = await cluster.router(changes, stays)
    registry = router.services.registry
    await eventually(lambda: len(registry.usable(DECODE)) == 2)
    status, answer = await switch(router, node=changes.target, role="prefill", drain_timeout_s=1.5)
    assert status == 202 and answer["was"] == "decode" and answer["state"] == "draining"
    [wish] = changes.status.role_wishes
    assert (wish.role, wish.drain_timeout_s) == (NODE_ROLE_PREFILL, 1.5)
    await changes.status.change(role=NODE_ROLE_PREFILL, epoch=77, http_port=9)
    await eventually(lambda: len(registry.usable(PREFILL)) == 1)
    [node] = registry.usable(PREFILL)
    assert node.address.target == node.address.status_target
    changes.status.silent = True
    status, answer = await switch(router, node=node.address.target, role="decode")
    assert status == 202 and changes.status.role_wishes[-1].role == NODE_ROLE_DECODE
    assert registry.usable(PREFILL) == [], "it drains, before any report says so"


async def test_what_operators_are_refused(cluster: Cluster) -> None:
    decode, prefill = await cluster.decode("d"), await cluster.prefill("p")
    router = await cluster.router(decode, prefill)
    await eventually(lambda: len(router.services.registry.usable(DECODE)) == 1)
    await eventually(lambda: len(router.services.registry.usable(PREFILL)) == 1)
    prefill.status.role_fault = "this node is a prefill node for good"
    for wish, code, told in (
        ({"node": decode.target, "role": "prefill"}, 400, "last decode node of 'demo'"),
        ({"node": prefill.target, "role": "decode"}, 400, "prefill node for good"),
        ({"node": "nowhere:1", "role": "decode"}, 404, prefill.target),
        ({"node": decode.target, "role": "router"}, 400, "JSON with node, role, drain"),
        ({"node": decode.target, "role": "decode", "drain_timeout_s": -1}, 400, "drain_timeout_s"),
    ):
        status, answer = await switch(router, **wish)
        assert status == code and told in answer["error"]["message"], (wish, answer)
    assert decode.status.role_wishes == []
    assert len(router.services.registry.usable(PREFILL)) == 1, "refused: it goes on as it was"


async def test_keys_of_clients_do_not_change_roles(cluster: Cluster) -> None:
    decode, other = await cluster.decode("d"), await cluster.decode("o")
    router = await cluster.router(decode, other, api_keys="secret")
    headers = {"authorization": "Bearer secret"}
    body = {"node": decode.target, "role": "prefill"}
    async with router.client.post(f"{router.url}/switch_role", json=body) as response:
        assert response.status == 401
    url = f"{router.url}/switch_role"
    async with router.client.post(url, json=body, headers=headers) as response:
        assert (
            response.status == 403 and "--admin-port" in (await response.json())["error"]["message"]
        )
    assert decode.status.role_wishes == []
