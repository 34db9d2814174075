"""The registry believes things about nodes: reports, restarts, silence, ejection."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.adapter_call import AdapterCall
from router.nodes.address import NodeAddress, NodeRole
from router.nodes.health import EjectionPolicy, Health
from router.nodes.node import NodeState
from router.nodes.operations.named_node import named_node
from router.nodes.registry import ReportOutcome
from router.nodes.report import NodeReport
from router.observe.metrics import NodeCollector
from tandem_pb.node_pb2 import NODE_ROLE_DECODE, NodeLoad
from tests.router.factories import Fleet, address, report


def test_only_newer_reports_count() -> None:
    fleet = Fleet()
    node = fleet.add("a", sequence=5, num_running_requests=5)
    apply = fleet.registry.apply_report
    for sequence in (4, 5):
        outcome = apply(node.address, report(sequence=sequence, num_running_requests=99))
        assert outcome is ReportOutcome.OUTDATED
    assert node.predicted_requests == 5
    assert apply(node.address, report(sequence=6, num_running_requests=6)) is ReportOutcome.APPLIED
    assert node.predicted_requests == 6


def test_a_node_without_partners_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet, prefill = Fleet(), NodeRole.PREFILL
    fleet.add("decode", fingerprint="1-float32-aa")
    fits = fleet.add("fits", prefill, fingerprint="1-float32-aa")
    assert not caplog.records
    odd = fleet.add("odd", prefill, fingerprint="1-bfloat16-aa", sequence=1)
    more = report(prefill, fingerprint="1-bfloat16-aa", sequence=2)
    fleet.registry.apply_report(odd.address, more)
    (record,) = caplog.records
    assert all(word in record.message for word in ("odd", "1-bfloat16-aa", "1-float32-aa", "dtype"))
    restarted = report(prefill, fingerprint="1-float32-bb", epoch=99)
    fleet.registry.apply_report(fits.address, restarted)
    assert "1-float32-bb" in caplog.records[-1].message


def test_a_restarted_node_is_a_new_node() -> None:
    fleet = Fleet()
    old = fleet.add("a", epoch=7, sequence=100)
    old.health.consecutive_failures = 2
    with old.hold_request():
        outcome = fleet.registry.apply_report(old.address, report(epoch=8, sequence=1))
        assert outcome is ReportOutcome.RESTARTED
        new = fleet.node("a")
        assert new is not old
        assert (new.work.num_requests, new.health.consecutive_failures) == (0, 0)
    assert new.work.num_requests == 0
    assert not fleet.registry.record_failure(old)
    late = fleet.registry.apply_report(old.address, report(epoch=7, sequence=101))
    assert late is ReportOutcome.OUTDATED
    assert fleet.node("a") is new


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 30)), min_size=1, max_size=60))
def test_any_order_of_reports_never_goes_back(arrivals: list[tuple[int, int]]) -> None:
    fleet = Fleet()
    fleet.registry.set_members([address("a")])
    epochs_seen: list[int] = []
    last_sequence: dict[int, int] = {}
    for epoch, sequence in arrivals:
        fleet.registry.apply_report(address("a"), report(epoch=epoch, sequence=sequence))
        known = fleet.node("a").report
        assert known is not None
        if known.epoch not in epochs_seen:
            epochs_seen.append(known.epoch)
        assert known.epoch == epochs_seen[-1], "an epoch that was replaced came back"
        assert known.sequence >= last_sequence.get(known.epoch, 0)
        last_sequence[known.epoch] = known.sequence


def test_a_report_from_a_node_of_the_other_role_is_refused() -> None:
    fleet = Fleet()
    fleet.registry.set_members([address("a")])
    outcome = fleet.registry.apply_report(address("a"), report(NodeRole.PREFILL))
    assert outcome is ReportOutcome.WRONG_ROLE
    unknown = NodeReport.from_message(NodeLoad(node_id="x", role=0, epoch=1, sequence=1))
    assert fleet.registry.apply_report(address("a"), unknown) is ReportOutcome.WRONG_ROLE
    assert fleet.registry.state(fleet.node("a")) is NodeState.JOINING


def test_reports_of_strangers_are_refused() -> None:
    fleet = Fleet()
    assert fleet.registry.apply_report(address("x"), report()) is ReportOutcome.UNKNOWN_NODE


def test_a_node_that_is_leaving_is_used_only_when_there_is_no_other() -> None:
    fleet = Fleet()
    old, new = address("old"), address("new")
    fleet.registry.set_members([old, new], leaving=[old])
    fleet.registry.apply_report(old, report())
    assert fleet.registry.state(fleet.node("old")) is NodeState.LEAVING
    assert fleet.registry.usable(NodeRole.DECODE) == [fleet.node("old")], "the new one is joining"
    fleet.registry.apply_report(new, report())
    assert fleet.registry.usable(NodeRole.DECODE) == [fleet.node("new")]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 0.0])
def test_numbers_that_make_no_sense_count_as_unknown(value: float) -> None:
    load = NodeLoad(
        node_id="x",
        role=NODE_ROLE_DECODE,
        prefill_tokens_per_s=value,
        seconds_since_progress=value,
        num_free_blocks=20,
        num_total_blocks=10,
    )
    got = NodeReport.from_message(load)
    assert (got.prefill_tokens_per_s, got.seconds_since_progress) == (0.0, 0.0)
    assert got.kv_usage == 0.0


def test_a_report_says_whose_adapters_its_calls_are_about() -> None:
    """A prefill node of several models tells of calls for each."""
    load = NodeLoad(node_id="x", role=NODE_ROLE_DECODE, model_name="demo")
    load.adapter_calls.add(name="poet", digest="d", path="/a/poet", version=9, model="twin")
    load.adapter_calls.add(name="poet", version=7)
    got = NodeReport.from_message(load)
    assert got.adapter_calls == (
        AdapterCall("poet", "d", "/a/poet", 9, "twin"),
        AdapterCall("poet", "", "", 7, ""),
    )


def test_the_states_of_a_node_in_the_order_of_its_life() -> None:
    fleet = Fleet()
    registry, clock = fleet.registry, fleet.clock
    registry.set_members([address("a")])
    node = fleet.node("a")
    assert registry.state(node) is NodeState.JOINING
    registry.apply_report(node.address, report(sequence=1))
    assert registry.state(node) is NodeState.READY
    clock.now += 3.1
    assert registry.state(node) is NodeState.SUSPECT
    registry.apply_report(node.address, report(sequence=2))
    assert registry.state(node) is NodeState.READY
    registry.mark_disconnected(node.address)
    assert registry.state(node) is NodeState.SUSPECT
    registry.apply_report(node.address, report(sequence=3, seconds_since_progress=30.0))
    assert registry.state(node) is NodeState.SUSPECT
    registry.apply_report(node.address, report(sequence=4, draining=True))
    assert registry.state(node) is NodeState.DRAINING
    clock.now += 10.1
    assert registry.state(node) is NodeState.DOWN
    registry.set_members([])
    assert not registry.all_nodes()


def test_members_that_stay_keep_what_is_known_of_them() -> None:
    fleet = Fleet()
    node = fleet.add("a")
    fleet.registry.set_members([address("a"), address("b")])
    assert fleet.node("a") is node
    assert fleet.registry.state(node) is NodeState.READY


def test_failures_in_a_row_eject_and_a_success_forgets_them() -> None:
    fleet = Fleet()
    node, _other = fleet.add("a"), fleet.add("b")
    registry = fleet.registry
    registry.record_failure(node)
    registry.record_failure(node)
    registry.record_success(node)
    assert not registry.record_failure(node)
    assert not registry.record_failure(node)
    assert registry.record_failure(node)
    assert registry.state(node) is NodeState.EJECTED
    fleet.clock.now += 5.1
    registry.apply_report(node.address, report(sequence=2))
    assert registry.state(node) is NodeState.HALF_OPEN
    registry.record_success(node)
    assert registry.state(node) is NodeState.READY


def test_a_half_open_node_gets_one_request_at_a_time() -> None:
    node = Fleet().add("a")
    with node.hold_request():
        assert node.health.accepts, "only an ejection makes it doubtful"
    node.health.half_open = True
    with node.hold_tokens(5):
        assert not node.health.accepts
        with node.hold_request():
            assert not node.health.accepts
        assert not node.health.accepts
    assert node.health.accepts, "a probe without a verdict, as when the client left"


def test_the_version_moves_when_a_node_comes_goes_or_changes_its_use() -> None:
    fleet = Fleet()
    registry = fleet.registry

    def moved(change: Callable[[], object]) -> bool:
        before = registry.version
        change()
        return registry.version != before

    node = fleet.add("a")
    other = fleet.add("b")
    sequence = itertools.count(2)

    def tell(**fields: Any) -> Callable[[], object]:
        fresh = report(sequence=next(sequence), **fields)
        return lambda: registry.apply_report(node.address, fresh)

    assert not moved(tell(num_running_requests=7))
    assert moved(tell(draining=True))
    assert moved(tell(draining=False))
    assert moved(tell(fingerprint="new"))
    assert moved(lambda: registry.mark_disconnected(node.address))
    assert moved(tell(fingerprint="new"))
    assert moved(lambda: [registry.record_failure(other) for _ in range(3)])
    assert moved(lambda: registry.set_members([node.address]))


def test_a_node_that_flaps_is_the_same_member() -> None:
    """Tables by node are looked through when members change, and not with each flap."""
    fleet = Fleet()
    where = fleet.add("a").address
    registry = fleet.registry
    members = registry.members_version
    registry.mark_disconnected(where)
    version = registry.version
    for _ in range(3):  # Each failed call says so again.
        registry.mark_disconnected(where)
    assert registry.version == version
    registry.apply_report(where, report(sequence=2))
    assert (registry.version > version, registry.members_version) == (True, members)
    registry.apply_report(where, report(epoch=2))
    assert registry.members_version > members
    members = registry.members_version
    registry.set_members([])
    assert registry.members_version > members


def test_a_node_with_two_addresses_is_one_node(caplog: pytest.LogCaptureFixture) -> None:
    """A name has an address of each family of IP; counted twice, a node got twice its requests."""
    fleet = Fleet()
    registry = fleet.registry
    first, second, other = address("10.0.0.1"), address("[fd00::1]"), address("10.0.0.2")
    registry.set_members([first, second, other])

    def tell(where: NodeAddress, name: str, **fields: Any) -> ReportOutcome:
        return registry.apply_report(where, report(node_id=name, **fields))

    def used() -> list[str]:
        return [node.address.target for node in registry.usable(NodeRole.DECODE)]

    assert tell(first, "a") is tell(other, "b") is ReportOutcome.APPLIED
    for sequence in (2, 3):
        assert tell(second, "a", sequence=sequence) is ReportOutcome.LISTED_TWICE
    assert used() == [first.target, other.target]
    assert caplog.text.count("are one decode node") == 1
    states = [registry.state(node) for node in registry.all_nodes()]
    assert states == [NodeState.READY, NodeState.ELSEWHERE, NodeState.READY]
    assert named_node(registry, second.target).address == first
    registry.mark_disconnected(second)
    assert registry.state(registry.all_nodes()[1]) is NodeState.JOINING, "nothing is known there"
    registry.set_members([first, second, other])
    assert tell(second, "a", sequence=4) is ReportOutcome.LISTED_TWICE
    registry.mark_disconnected(first)
    assert tell(second, "a", sequence=5) is ReportOutcome.LISTED_TWICE, "prefixes stay known"
    fleet.clock.now += 3.5
    assert tell(other, "b", sequence=2) is ReportOutcome.APPLIED
    assert tell(second, "a", sequence=5) is ReportOutcome.APPLIED
    assert tell(first, "a", sequence=6) is ReportOutcome.LISTED_TWICE
    assert used() == [second.target, other.target]
    assert tell(second, "a", epoch=2) is ReportOutcome.RESTARTED
    assert tell(first, "a", epoch=2, sequence=2) is ReportOutcome.LISTED_TWICE
    assert used() == [second.target, other.target]


def test_figures_of_many_nodes_are_collected_in_parts() -> None:
    """A scrape serves streams between two of them."""
    fleet = Fleet()
    places = [address(f"n{i}") for i in range(250)]
    fleet.registry.set_members(places)
    fleet.registry.apply_report(places[7], report())
    families = list(NodeCollector(fleet.registry).collect())
    assert max(len(family.samples) for family in families) <= 100
    names = [name for name, _ in itertools.groupby(family.name for family in families)]
    assert len(names) == len(set(names)) == 5, "parts of a family are one after the other"
    samples = [sample for family in families for sample in family.samples]
    counts = Counter(sample.name.removeprefix("tandem_router_") for sample in samples)
    assert counts == {
        "nodes": len(NodeRole) * len(NodeState),
        "node_open_requests": 250,
        "node_pending_tokens": 250,
        "node_report_age_seconds": 1,
        "node_drained": 250,
    }


def test_one_failure_after_an_ejection_ejects_again_for_longer() -> None:
    policy, sick, now = EjectionPolicy(), Health(), 1000.0
    tier = [sick, Health()]
    lengths = []
    for _ in range(15):
        while not policy.record_failure(sick, tier, now):
            assert sick.consecutive_failures <= policy.failures
        lengths.append(sick.ejected_until - now)
        now = sick.ejected_until + 1
    assert lengths[:3] == [5.0, 10.0, 15.0]
    assert max(lengths) == 60.0
    now += 61
    assert policy.record_failure(sick, tier, now)
    assert sick.ejected_until - now == 5.0


@settings(deadline=None)
@given(
    st.integers(1, 12),
    st.floats(0, 1),
    st.lists(st.tuples(st.integers(0, 11), st.booleans(), st.floats(0, 20)), max_size=200),
)
def test_never_more_than_the_allowed_part_of_a_tier_is_ejected(
    size: int, fraction: float, steps: list[tuple[int, bool, float]]
) -> None:
    policy = EjectionPolicy(max_fraction=fraction)
    tier, now = [Health() for _ in range(size)], 0.0
    for index, ok, pause in steps:
        now += pause
        health = tier[index % size]
        if ok:
            policy.record_success(health)
        else:
            policy.record_failure(health, tier, now)
        assert sum(h.is_ejected(now) for h in tier) <= fraction * size


def test_the_only_node_of_a_tier_is_never_ejected() -> None:
    fleet = Fleet()
    node = fleet.add("a")
    assert not any(fleet.registry.record_failure(node) for _ in range(50))


def test_work_is_taken_back_whatever_happens() -> None:
    fleet = Fleet()
    node = fleet.add("a", num_running_requests=3)
    with pytest.raises(ValueError, match="boom"), node.hold_request(), node.hold_tokens(7):
        assert (node.predicted_requests, node.predicted_tokens) == (4, 7)
        raise ValueError("boom")
    assert (node.work.num_requests, node.work.num_tokens) == (0, 0)


def _any_fields() -> Any:
    return st.fixed_dictionaries(
        {
            "num_waiting_requests": st.integers(0, 1000),
            "num_running_requests": st.integers(0, 1000),
            "num_waiting_tokens": st.integers(0, 10**9),
        }
    )


@settings(deadline=None)
@given(_any_fields(), st.integers(0, 50))
def test_predictions_are_at_least_the_report_and_our_own_work(
    fields: dict[str, int], own: int
) -> None:
    fleet = Fleet()
    node = fleet.add("a", **fields)
    node.work.num_requests = own
    assert node.predicted_requests >= own
    assert node.predicted_requests >= fields["num_waiting_requests"]
    assert node.predicted_tokens >= fields["num_waiting_tokens"]


def test_a_report_that_exaggerates_is_cut_to_what_can_be() -> None:
    load = NodeLoad(
        node_id="x" * 60_000,
        model_name="m" * 60_000,
        fingerprint="f" * 60_000,
        prefill_tokens_per_s=1e-300,
        recent_prefixes=range(8000),
    )
    got = NodeReport.from_message(load)
    assert {len(got.node_id), len(got.model_name), len(got.fingerprint)} == {512}
    assert got.prefill_tokens_per_s == 0.0, "it would make every estimate endless"
    assert got.recent_prefixes == tuple(range(8000 - 256, 8000))
