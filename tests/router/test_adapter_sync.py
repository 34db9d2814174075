"""Nodes that missed calls about adapters follow them later, and nothing that was unloaded comes
back."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from edge.adapter_call import AdapterCall
from router.nodes.adapter_set import AdapterId, AdapterSet, adapter_set
from router.nodes.adapters import adapter_sync
from router.nodes.adapters.adapter_asker import (
    LOADED,
    OUTDATED,
    UNKNOWN,
    UNLOADED,
    NodeAnswer,
    failure,
)
from router.nodes.adapters.adapter_sync import AdapterSync
from router.nodes.adapters.adapters import ClusterAdapters
from router.nodes.address import NodeRole
from router.nodes.node import Node
from tandem_pb.node_pb2 import LoadAdapterRequest, UnloadAdapterRequest
from tests.router.cluster import Cluster, RunningRouter, eventually
from tests.router.factories import Fleet, report
from tests.router.fakes import FakeNode

POET, OTHER = "a" * 64, "b" * 64
OLD = AdapterCall("poet", POET, "poet", 7, "demo")
NEW = AdapterCall("poet", OTHER, "poet-2", 9, "demo")
GONE = AdapterCall("poet", "", "", 8, "demo")


@dataclass
class Nodes:
    """A fleet whose nodes answer as a test says, and the sync that asks them."""

    fleet: Fleet = field(default_factory=Fleet)
    answers: dict[str, NodeAnswer] = field(default_factory=dict)
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.sync = AdapterSync(
            adapters=ClusterAdapters(registry=self.fleet.registry, asker=self)  # type: ignore[arg-type]
        )
        self.sequence = 1

    async def ask(
        self, node: Node, request: LoadAdapterRequest | UnloadAdapterRequest
    ) -> NodeAnswer:
        name = node.address.target.partition(":")[0]
        loads = isinstance(request, LoadAdapterRequest)
        self.asked.append((name, "load" if loads else "unload", request.version))
        if isinstance(request, LoadAdapterRequest):
            assert request.in_place and request.digest and request.path
        if name in self.broken:
            raise RuntimeError(name)
        if request.name in self.held:
            await asyncio.Event().wait()
        return self.answers.get(name, NodeAnswer(LOADED if loads else UNLOADED))

    def add(self, name: str, role: NodeRole, *calls: AdapterCall) -> None:
        self.fleet.add(name, role, fingerprint="f", adapters=served(*calls), adapter_calls=calls)

    def tell(self, name: str, *calls: AdapterCall, epoch: int = 1) -> None:
        """Reports that a node has followed calls; of another epoch: only these."""
        node, self.sequence = self.fleet.node(name), self.sequence + 1
        said = report(
            node.address.role,
            fingerprint="f",
            epoch=epoch,
            sequence=self.sequence,
            adapters=served(*calls),
            adapter_calls=calls,
        )
        self.fleet.registry.apply_report(node.address, said)

    async def step(self) -> list[tuple[str, str, int]]:
        """Returns what was asked since the last step."""
        self.asked.clear()
        self.sync.step()
        await settled()
        return sorted(self.asked)


async def settled() -> None:
    for _ in range(3):  # Tasks begin, end, and are taken off.
        await asyncio.sleep(0)


def served(*calls: AdapterCall) -> AdapterSet:
    return adapter_set(AdapterId(call.name, call.digest) for call in calls if call.digest)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


async def test_a_node_that_comes_later_is_asked_once(nodes: Nodes) -> None:
    nodes.add("p", NodeRole.PREFILL, OLD)
    nodes.add("d", NodeRole.DECODE, OLD)
    assert await nodes.step() == []
    nodes.add("new", NodeRole.DECODE)
    assert nodes.sync.num_behind() == {NodeRole.PREFILL: 0, NodeRole.DECODE: 1}
    assert await nodes.step() == [("new", "load", 7)]
    assert await nodes.step() == []
    nodes.tell("new", OLD)
    assert await nodes.step() == []
    nodes.tell("new", epoch=2)
    assert await nodes.step() == [("new", "load", 7)]


async def test_what_nodes_say_in_reports_is_missed_no_longer(nodes: Nodes) -> None:
    """Another router has asked them, or they were faster than this one's look."""
    bard = AdapterCall("bard", OTHER, "bard", 3, "demo")
    nodes.fleet.registry.adapters.learn("demo", [OLD, bard])
    nodes.add("d", NodeRole.DECODE)
    assert nodes.sync.num_behind()[NodeRole.DECODE] == 2
    nodes.tell("d", OLD)
    assert nodes.sync.num_behind()[NodeRole.DECODE] == 1
    nodes.tell("d", bard)
    nodes.fleet.registry.adapters.learn("demo", [NEW])
    assert await nodes.step() == [("d", "load", NEW.version)]


async def test_prefill_nodes_load_first_and_unload_last(nodes: Nodes) -> None:
    nodes.fleet.registry.adapters.learn("demo", [OLD])
    nodes.add("p", NodeRole.PREFILL)
    nodes.add("d", NodeRole.DECODE)
    assert await nodes.step() == [("p", "load", 7)]
    assert await nodes.step() == []
    nodes.tell("p", OLD)
    assert await nodes.step() == [("d", "load", 7)]
    nodes.tell("d", OLD)
    nodes.fleet.registry.adapters.learn("demo", [GONE])
    assert await nodes.step() == [("d", "unload", 8)]
    assert await nodes.step() == []
    nodes.tell("d", GONE)
    assert await nodes.step() == [("p", "unload", 8)]


async def test_decode_nodes_without_prefill_nodes_load_at_once(nodes: Nodes) -> None:
    nodes.fleet.registry.adapters.learn("demo", [OLD])
    nodes.add("d", NodeRole.DECODE)
    assert await nodes.step() == [("d", "load", 7)]


async def test_what_was_unloaded_does_not_come_back_with_a_node_that_was_away(
    nodes: Nodes,
) -> None:
    nodes.add("d", NodeRole.DECODE, GONE)
    nodes.add("away", NodeRole.DECODE, OLD)
    assert await nodes.step() == [("away", "unload", 8)]
    nodes.answers["away"] = NodeAnswer(UNKNOWN)
    nodes.tell("away", epoch=2)
    assert await nodes.step() == [("away", "unload", 8)]
    assert await nodes.step() == []


async def test_the_newest_of_two_calls_decides_everywhere(nodes: Nodes) -> None:
    nodes.add("p", NodeRole.PREFILL, NEW)
    nodes.add("d", NodeRole.DECODE, OLD)
    assert await nodes.step() == [("d", "load", 9)]
    nodes.answers["d"] = NodeAnswer(OUTDATED)
    nodes.tell("d", OLD, epoch=2)
    assert await nodes.step() == [("d", "load", 9)]
    assert await nodes.step() == []


async def test_a_node_that_cannot_is_asked_again_after_longer_and_longer_pauses(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.add("p", NodeRole.PREFILL, OLD)
    nodes.add("d", NodeRole.DECODE)
    nodes.answers["d"] = failure("no such folder")
    pauses = []
    for _ in range(8):
        assert await nodes.step() == [("d", "load", 7)]
        began = nodes.fleet.clock.now
        while True:
            nodes.fleet.clock.now += 0.5
            nodes.tell("d")
            nodes.tell("p", OLD)
            if nodes.sync.num_behind()[NodeRole.DECODE] and await nodes.step():
                break
        pauses.append(nodes.fleet.clock.now - began)
        nodes.fleet.clock.now += 61
        nodes.tell("d")
        nodes.tell("p", OLD)
    assert pauses == sorted(pauses) and pauses[0] == 1 and pauses[-1] == 60
    assert "no such folder" in caplog.text and "'poet'" in caplog.text


async def test_models_that_share_prefill_nodes_keep_their_adapters_apart(nodes: Nodes) -> None:
    """The prefill node has what the newer call about the name says."""
    nodes.add("p", NodeRole.PREFILL, OLD)
    nodes.add("d", NodeRole.DECODE, OLD)
    twin = {"fingerprint": "f", "model_name": "twin"}
    call = AdapterCall("poet", OTHER, "poet-2", 9, "twin")
    nodes.fleet.add("t", **twin, adapters=served(call), adapter_calls=(replace(call, model=""),))
    assert await nodes.step() == [("p", "load", 9)]
    nodes.tell("p", call)
    assert await nodes.step() == []
    ledger = nodes.fleet.registry.adapters
    assert (ledger.calls("demo")["poet"], ledger.calls("twin")["poet"]) == (OLD, call)


async def test_an_unload_that_waits_for_requests_holds_up_nothing(nodes: Nodes) -> None:
    slow = AdapterCall("slow", "", "", 3, "demo")
    nodes.held.add("slow")
    nodes.fleet.registry.adapters.learn("demo", [slow, OLD])
    nodes.add("d", NodeRole.DECODE)
    assert await nodes.step() == [("d", "load", 7), ("d", "unload", 3)]
    nodes.fleet.registry.adapters.learn("demo", [GONE])
    assert await nodes.step() == [("d", "unload", 8)]
    assert await nodes.step() == []


async def test_a_node_that_cannot_be_asked_holds_up_no_other(nodes: Nodes) -> None:
    nodes.fleet.registry.adapters.learn("demo", [OLD])
    nodes.add("d", NodeRole.DECODE)
    nodes.add("e", NodeRole.DECODE)
    nodes.broken.add("d")
    assert await nodes.step() == [("d", "load", 7), ("e", "load", 7)]
    assert await nodes.step() == []
    nodes.fleet.clock.now += 1
    nodes.tell("d")
    nodes.tell("e", OLD)
    assert await nodes.step() == [("d", "load", 7)]


async def test_names_that_an_operator_changes_now_are_left_alone(nodes: Nodes) -> None:
    nodes.add("p", NodeRole.PREFILL, OLD)
    nodes.add("d", NodeRole.DECODE)
    nodes.sync.adapters.changing.add(("demo", "poet"))
    assert await nodes.step() == []
    nodes.sync.adapters.changing.clear()
    assert await nodes.step() == [("d", "load", 7)]


async def test_routers_bring_nodes_up_to_date_after_restarts_of_all(cluster: Cluster) -> None:
    nodes: list[FakeNode] = [
        await cluster.decode("d"), await cluster.decode("e"), await cluster.prefill("p"),
    ]  # fmt: skip
    router = await cluster.router(*nodes)
    body = {"lora_name": "poet", "lora_path": POET}
    async with router.client.post(router.url + "/v1/load_lora_adapter", json=body) as response:
        assert response.status == 200
    async with router.client.post(router.url + "/v1/load_lora_adapter", json=body) as response:
        assert (response.status, "taken" in await response.text()) == (400, True)
    for node in nodes:  # The router remembers what none of the nodes does.
        await node.restart()
    await eventually(lambda: all(has(node, "poet") for node in nodes))
    other = await cluster.router(*nodes)  # It has heard of no call.
    await nodes[0].restart()
    await eventually(lambda: has(nodes[0], "poet"))
    async with other.post({"model": "poet", "prompt": "hello", "max_tokens": 2}) as answer:
        assert answer.status == 200
    await nodes[1].stop()
    left = list(nodes[1].status.load.adapters)
    await eventually(lambda: num_connected(router) == 2)
    url = router.url + "/v1/unload_lora_adapter"
    async with router.client.post(url, json={"lora_name": "poet"}) as response:
        assert response.status in (200, 503), await response.text()
    assert list(nodes[1].status.load.adapters) == left
    await nodes[1].start()
    await eventually(lambda: not any(has(node, "poet") for node in nodes))
    await eventually(lambda: "poet" not in router.services.models.table.adapters)


async def test_requests_wait_for_an_adapter_that_its_only_node_has_lost(cluster: Cluster) -> None:
    decode, prefill = await cluster.decode(), await cluster.prefill()
    router = await cluster.router(decode, prefill, no_node_wait_s=60.0)
    body = {"lora_name": "poet", "lora_path": POET}
    async with router.client.post(router.url + "/v1/load_lora_adapter", json=body) as response:
        assert response.status == 200
    decode.status.adapter_fault = "not now"
    await decode.restart()
    await eventually(lambda: "load poet" in decode.status.adapter_calls[1:])
    asked = asyncio.create_task(router.text({"model": "poet", "prompt": "hi", "max_tokens": 2}))
    await eventually(lambda: router.num_open == 1)
    assert decode.requests == []
    decode.status.adapter_fault = ""
    assert "t1" in await asked
    async with router.post({"model": "painter", "prompt": "hi"}) as response:
        assert response.status == 404


def has(node: FakeNode, name: str) -> bool:
    return any(one.name == name for one in node.status.load.adapters)


def num_connected(router: RunningRouter) -> int:
    return sum(node.connected for node in router.services.registry.all_nodes())


async def test_what_a_node_has_followed_is_not_looked_at_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes times adapters are a million in a large cluster, and this looks twice a second."""
    calls = [AdapterCall(f"lora-{i}", f"{i:064}", f"lora-{i}", i + 1, "demo") for i in range(20)]
    for i in range(3):
        nodes.add(f"d{i}", NodeRole.DECODE, *calls)
    assert await nodes.step() == []
    looks = list[tuple[str, str]]()
    follows = AdapterSync._follows

    def look(sync: AdapterSync, node: Node, call: AdapterCall) -> bool:
        looks.append((node.address.target, call.name))
        return follows(sync, node, call)

    monkeypatch.setattr(AdapterSync, "_follows", look)
    assert await nodes.step() == [] and nodes.sync.num_behind()[NodeRole.DECODE] == 0
    assert looks == []
    later = replace(calls[7], version=100, digest=OTHER)
    nodes.fleet.registry.adapters.learn("demo", [later])
    assert nodes.sync.num_behind()[NodeRole.DECODE] == 3
    assert set(looks) == {(f"d{i}:80", "lora-7") for i in range(3)}
    assert await nodes.step() == [(f"d{i}", "load", 100) for i in range(3)]


async def test_a_tier_that_starts_anew_is_looked_at_in_parts(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has missed hundreds of thousands of calls, and requests wait while they are looked at."""
    monkeypatch.setattr(adapter_sync, "_MOST_LOOKS", 100)
    calls = [AdapterCall(f"lora-{i}", f"{i:064}", f"lora-{i}", i + 1, "demo") for i in range(100)]
    nodes.fleet.registry.adapters.learn("demo", calls)
    nodes.add("p", NodeRole.PREFILL, calls[50])
    for i in range(10):
        nodes.add(f"d{i}", NodeRole.DECODE)
    looks: list[Node] = []
    is_turn = AdapterSync._is_turn

    def look(sync: AdapterSync, node: Node, *rest: Any) -> bool:
        looks.append(node)
        return is_turn(sync, node, *rest)

    monkeypatch.setattr(AdapterSync, "_is_turn", look)
    asked: Counter[str] = Counter()
    for _ in range(20):
        looks.clear()
        nodes.asked.clear()
        nodes.sync.step()
        assert len(looks) <= 100
        await settled()
        assert len(looks) <= 100 + 10 * len(nodes.asked), "a node that has loaded one looks again"
        asked.update(name for name, _, version in nodes.asked if version == 51)
    assert asked == Counter(f"d{i}" for i in range(10)), "each has its turn once it has been found"
    assert nodes.sync.num_behind()[NodeRole.DECODE] == 990


async def test_a_node_loads_the_next_adapter_as_soon_as_one_is_there(nodes: Nodes) -> None:
    """A node that restarts may have lost a thousand; looks are half a second apart."""
    calls = [AdapterCall(f"lora-{i}", f"{i:064}", f"lora-{i}", i + 1, "demo") for i in range(20)]
    nodes.fleet.registry.adapters.learn("demo", calls)
    nodes.held.add("lora-5")
    nodes.add("d", NodeRole.DECODE)
    nodes.add("faulty", NodeRole.DECODE)
    nodes.answers["faulty"] = failure("no such folder")
    await nodes.step()
    for _ in range(40):
        await asyncio.sleep(0)
    versions = [version for name, _, version in nodes.asked if name == "d"]
    assert versions == [*range(20, 5, -1)], "one after the other, until one takes long"
    assert [name for name, *_ in nodes.asked].count("faulty") == 1, "a failure waits for a look"


async def test_a_node_is_asked_to_unload_few_names_at_once(nodes: Nodes) -> None:
    """Each is a connection, and a node that starts anew has missed a thousand."""
    gone = [AdapterCall(f"lora-{i}", "", "", i + 1, "demo") for i in range(20)]
    nodes.fleet.registry.adapters.learn("demo", gone)
    nodes.held |= {"lora-19", "lora-18"}
    nodes.add("d", NodeRole.DECODE)
    nums = [len(await nodes.step()) for _ in range(4)]
    assert nums == [8, 6, 6, 0]
    assert nodes.sync.num_behind()[NodeRole.DECODE] == 2
