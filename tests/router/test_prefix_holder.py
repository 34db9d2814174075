"""Routers name to a prefill node who has the part of a prompt that it lacks."""

from __future__ import annotations

import random
from typing import Any

from router.nodes.address import NodeRole
from router.nodes.node import Node
from router.placement.tandem_policy import TandemPolicy
from router.request.info import RequestInfo
from tests.router.factories import Fleet, report, request

PREFILL, DECODE = NodeRole.PREFILL, NodeRole.DECODE
SHARING = {"serves_prefixes": True, "fingerprint": "f"}


def turn(*blocks: int, **fields: Any) -> RequestInfo:
    known = {"num_prompt_tokens": 1000 * len(blocks) + 10, "tokens_per_block": 1000.0}
    return request(prefix_blocks=blocks, **known, **fields)


def fleet_of(num_prefills: int) -> Fleet:
    fleet = Fleet()
    fleet.add("d", DECODE, **SHARING)
    for i in range(num_prefills):
        fleet.add(f"p{i}", PREFILL, **SHARING)
    return fleet


def says(fleet: Fleet, node: Node, *ends: int, **fields: Any) -> None:
    assert node.report is not None
    more = {**SHARING, **fields, "sequence": node.report.sequence + 1, "recent_prefixes": ends}
    fleet.registry.take_report(node.address, report(node.address.role, **more))


def holder(ends: dict[str, tuple[int, ...]], *blocks: int, **fields: Any) -> str:
    """Returns who is named to p0, where all others are busy. `ends`: what nodes have."""
    fleet = fleet_of(3)
    policy = TandemPolicy(fleet.registry, random.Random(1))
    for node in fleet.registry.all_nodes():
        name = node.address.target.removesuffix(":80")
        busy = {"num_waiting_tokens": 10**9} if name in ("p1", "p2") else {}
        says(fleet, node, *ends.get(name, ()), **busy, **(fields if name != "p0" else {}))
    placement = policy.place(turn(*blocks))
    assert placement.prefills[0] is fleet.node("p0")
    found = placement.prefix_holder
    return "" if found is None else found.address.target.removesuffix(":80")


def test_the_longest_match_is_named() -> None:
    assert holder({"p1": (2,), "p2": (3,)}, 1, 2, 3, 4) == "p2"
    assert holder({}, 1, 2, 3) == ""
    assert holder({"p1": (9,)}, 1, 2, 3) == ""


def test_nobody_is_named_for_what_the_node_has_itself() -> None:
    assert holder({"p0": (3,), "p1": (3,)}, 1, 2, 3, 4) == ""
    assert holder({"p0": (3,), "p1": (2,)}, 1, 2, 3, 4) == ""


def test_who_gave_the_last_answer_has_more_than_the_prompt() -> None:
    assert holder({"p0": (3,), "d": (3,)}, 1, 2, 3, 4) == "d"
    assert holder({"p1": (3,), "d": (3,)}, 1, 2, 3, 4) == "d"
    assert holder({"p1": (3,), "d": (2,)}, 1, 2, 3, 4) == "p1"
    assert holder({"p0": (3,), "d": (2,)}, 1, 2, 3, 4) == ""


def test_of_two_that_answered_the_later_is_named() -> None:
    """A turn that is no whole block longer ends with the block of the turn before."""
    fleet = fleet_of(1)
    fleet.add("e", DECODE, **SHARING)
    policy = TandemPolicy(fleet.registry, random.Random(1))
    says(fleet, fleet.node("p0"), 3)
    for name in ("d", "e", "d"):
        says(fleet, fleet.node(name), 3)
        assert policy.place(turn(1, 2, 3)).prefix_holder is fleet.node(name)


def test_nodes_that_share_nothing_or_do_not_fit_are_not_named() -> None:
    assert holder({"p1": (2,)}, 1, 2, 3) == "p1"
    assert holder({"p1": (2,), "d": (2,)}, 1, 2, 3, serves_prefixes=False) == ""


def test_a_draining_node_is_not_named() -> None:
    fleet = fleet_of(1)
    policy = TandemPolicy(fleet.registry, random.Random(1))
    says(fleet, fleet.node("d"), 2)
    assert policy.place(turn(1, 2, 3)).prefix_holder is fleet.node("d")
    fleet.add("e", DECODE, **SHARING)
    says(fleet, fleet.node("d"), 2, draining=True)
    placement = policy.place(turn(1, 2, 3))
    assert placement.decode is fleet.node("e") and placement.prefix_holder is None


def test_a_restarted_node_has_nothing() -> None:
    fleet = fleet_of(1)
    policy = TandemPolicy(fleet.registry, random.Random(1))
    says(fleet, fleet.node("d"), 2)
    fleet.registry.apply_report(fleet.node("d").address, report(DECODE, epoch=9, **SHARING))
    assert policy.place(turn(1, 2, 3)).prefix_holder is None


def test_nodes_that_are_gone_are_forgotten_without_a_request() -> None:
    """A router that is asked nothing, or has no prefill nodes, hears reports all the same."""
    fleet = fleet_of(1)
    policy = TandemPolicy(fleet.registry, random.Random(1))
    for name in ("d", "p0"):
        for epoch in range(1, 4):
            says(fleet, fleet.node(name), 7, epoch=epoch)
        node = fleet.node(name)
        known = policy.knowledge(node)
        index = known.answers if node.address.role is DECODE else known.index
        assert list(index.match([7]).holders(1)) == [(node, 1)]
