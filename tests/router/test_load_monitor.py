"""Load reports over real gRPC: fresh, late, broken, from a restarted node, from a liar."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import grpc
import pytest

from edge.security.credentials import Credentials
from router.nodes.adapter_set import AdapterId, adapter_set
from router.nodes.node import Node, NodeState
from router.nodes.report import NodeReport
from tandem_pb.node_pb2 import NODE_ROLE_DECODE, Adapter, NodeLoad
from tests.router.cluster import Cluster, RunningRouter, eventually
from tests.router.factories import address


def node_at(router: RunningRouter, target: str) -> Node:
    [node] = [n for n in router.services.registry.all_nodes() if n.address.target == target]
    return node


def state_of(router: RunningRouter, target: str) -> NodeState:
    return router.services.registry.state(node_at(router, target))


async def test_reports_reach_the_registry_from_both_tiers(cluster: Cluster) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode()
    router = await cluster.router(prefill, decode)
    await prefill.status.change(num_waiting_tokens=700)
    await decode.status.change(num_running_requests=3)
    await eventually(lambda: node_at(router, prefill.target).predicted_tokens == 700)
    await eventually(lambda: node_at(router, decode.target).predicted_requests == 3)
    assert (prefill.status.num_watchers, decode.status.num_watchers) == (1, 1)


async def test_a_dead_node_is_noticed_at_once_and_a_restarted_one_is_new(cluster: Cluster) -> None:
    decode = await cluster.decode()
    router = await cluster.router(decode)
    old = node_at(router, decode.target)
    old.health.consecutive_failures = 2
    await decode.stop()
    await eventually(lambda: state_of(router, decode.target) is NodeState.SUSPECT)
    await decode.restart()
    await eventually(lambda: state_of(router, decode.target) is NodeState.READY)
    new = node_at(router, decode.target)
    assert new is not old
    assert new.health.consecutive_failures == 0
    assert router.metric("tandem_router_node_reports_total", outcome="restarted") == 1


async def test_a_node_that_falls_silent_becomes_suspect_then_down_and_comes_back(
    cluster: Cluster,
) -> None:
    decode = await cluster.decode()
    router = await cluster.router(decode, stale_after_s=0.3, down_after_s=60.0)
    decode.status.silent = True
    await eventually(lambda: state_of(router, decode.target) is NodeState.SUSPECT)
    router.services.registry.clock = lambda: time.monotonic() + 60.0
    assert state_of(router, decode.target) is NodeState.DOWN
    await eventually(lambda: router.metric("tandem_router_watch_failures_total", tier="decode") > 0)
    decode.status.silent = False
    await eventually(lambda: state_of(router, decode.target) is NodeState.READY)
    await eventually(lambda: decode.status.num_watchers == 1)


async def test_a_router_that_was_held_up_itself_loses_no_watch(cluster: Cluster) -> None:
    decode = await cluster.decode()
    router = await cluster.router(decode, stale_after_s=0.3)
    loop, load = asyncio.get_running_loop(), decode.status.load
    for _ in range(3):
        loop.call_soon(time.sleep, 0.6)
        await eventually(lambda enough=load.sequence + 3: load.sequence > enough)
    await eventually(lambda: state_of(router, decode.target) is NodeState.READY)
    assert router.metric("tandem_router_watch_failures_total", tier="decode") == 0


async def test_an_engine_that_stands_still_is_suspect(cluster: Cluster) -> None:
    decode = await cluster.decode()
    router = await cluster.router(decode)
    await decode.status.change(seconds_since_progress=60.0)
    await eventually(lambda: state_of(router, decode.target) is NodeState.SUSPECT)


async def test_a_prefill_node_in_the_decode_list_is_never_used(cluster: Cluster) -> None:
    liar = await cluster.prefill("liar")
    router = await cluster.router(decode=f"127.0.0.1:9/{liar.status_port}")
    await eventually(
        lambda: router.metric("tandem_router_node_reports_total", outcome="wrong_role") > 0
    )
    async with router.post({"prompt": "x"}) as response:
        assert response.status == 503
        assert "1 joining" in (await response.json())["error"]["message"]
    await liar.status.change(role=NODE_ROLE_DECODE)
    await router.wait_usable(decode=1, prefill=0)


async def test_a_port_that_speaks_no_grpc_does_no_harm(cluster: Cluster) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\xff" * 5000)
        await reader.read(100)
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        decode = await cluster.decode()
        router = await cluster.router(decode=f"{decode.entry},127.0.0.1:9/{port}")
        await router.wait_usable(decode=1, prefill=0)
        await eventually(
            lambda: router.metric("tandem_router_watch_failures_total", tier="decode") > 0
        )
        for _ in range(5):
            await router.text({"prompt": "x"})


async def test_a_report_that_is_far_too_large_is_refused(cluster: Cluster) -> None:
    decode = await cluster.decode()
    decode.status.load.node_id = "x" * (4 << 20)
    router = await cluster.router(decode=decode.entry)
    await eventually(lambda: router.metric("tandem_router_watch_failures_total", tier="decode") > 0)
    assert state_of(router, decode.target) is NodeState.JOINING


async def test_a_node_without_the_status_service_is_never_used(cluster: Cluster) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    router = await cluster.router(decode=f"127.0.0.1:9/{port}")
    await eventually(lambda: router.metric("tandem_router_watch_failures_total", tier="decode") > 0)
    async with router.client.get(router.url + "/ready") as response:
        assert response.status == 503
    await server.stop(None)


async def test_adapters_that_a_node_leaves_out_are_those_of_its_last_report(
    cluster: Cluster,
) -> None:
    decode = await cluster.decode()
    router = await cluster.router(decode)
    await decode.status.serve_adapters({"poet": "a" * 64, "clerk": "b" * 64})
    node = node_at(router, decode.target)
    await eventually(lambda: node.adapters.by_name.keys() == {"poet", "clerk"})
    await decode.status.change(num_running_requests=7)
    await eventually(lambda: node.predicted_requests == 7)
    assert node.adapters.by_name.keys() == {"poet", "clerk"} and node.has_weights("a" * 64)
    await decode.status.serve_adapters({"poet": "c" * 64})
    await eventually(lambda: node.has_weights("c" * 64))
    assert node.adapters.by_name.keys() == {"poet"} and not node.has_weights("a" * 64)
    await decode.stop()
    await eventually(lambda: state_of(router, decode.target) is NodeState.SUSPECT)
    await decode.restart()
    await eventually(lambda: node_at(router, decode.target).has_weights("c" * 64))


async def test_as_many_adapters_as_a_node_may_have_are_taken(cluster: Cluster) -> None:
    """They are more than a megabyte with long names, and a report that is refused loses the
    node."""
    decode = await cluster.decode()
    router = await cluster.router(decode)
    await decode.status.serve_adapters({f"{i:0512}": f"{i:064}" for i in range(4096)})
    await eventually(lambda: len(node_at(router, decode.target).adapters) == 4096)


async def test_reports_are_asked_for_further_apart_when_there_are_many_nodes(
    cluster: Cluster,
) -> None:
    """Nodes have some for each prompt, of whichever router: they would be all a router does."""
    decode = await cluster.decode()
    router = await cluster.router(decode)
    await eventually(lambda: decode.status.num_watchers == 1)
    few = decode.status.watched[-1]
    assert few.change_interval_s < 0.02 and 0.225 <= few.interval_s <= 0.25
    await decode.status.serve_adapters({"poet": "a" * 64})
    monitor = router.services.monitor
    [own] = [node.address for node in router.services.registry.all_nodes()]
    others = {address(f"10.255.0.{i}") for i in range(199)}
    node = node_at(router, decode.target)
    monitor.set_members({own, *others})
    await eventually(lambda: decode.status.watched[-1].change_interval_s == 0.1)
    assert 0.225 <= decode.status.watched[-1].interval_s <= 0.25
    await eventually(lambda: decode.status.num_watchers == 1)
    await decode.status.change(num_running_requests=5)
    await eventually(lambda: node.predicted_requests == 5)
    assert node_at(router, decode.target) is node and node.adapters.by_name.keys() == {"poet"}
    assert router.metric("tandem_router_watch_failures_total", tier="decode") == 0
    assert len(decode.status.watched) == 2
    monitor.set_members({own})
    await decode.status.change(num_running_requests=6)
    await eventually(lambda: decode.status.watched[-1].change_interval_s < 0.02)
    assert len(decode.status.watched) == 3


async def test_nodes_that_appear_together_are_called_one_by_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The channels of 1,000 took the loop for a second, in which no stream went on."""
    router = await cluster.router(decode="127.0.0.1:9/9")
    turn, opened = 0, Counter[int]()

    def channel(*_: object, **__: object) -> None:
        opened[turn] += 1
        raise OSError

    monkeypatch.setattr(Credentials, "channel", channel)
    router.services.monitor.set_members(address(f"10.255.0.{i}") for i in range(1, 101))
    while opened.total() < 100:
        await asyncio.sleep(0)
        turn += 1
    assert max(opened.values()) == 1


async def test_reports_of_nodes_that_appear_together_do_not_stay_together(
    cluster: Cluster,
) -> None:
    """Those of 1,000 nodes took the loop for 0.1 s, each second."""
    nodes = [await cluster.decode() for _ in range(4)]
    await cluster.router(*nodes)
    await eventually(lambda: all(node.status.watched for node in nodes))
    assert len({node.status.watched[0].interval_s for node in nodes}) == 4


def test_nodes_with_equal_adapters_share_one_set() -> None:
    """So one look at all nodes reads it once."""
    names = [f"lora-{i}" for i in range(100)]

    def read(prefix: str) -> NodeReport:
        adapters = [Adapter(name=name, digest=prefix + name) for name in names]
        return NodeReport.from_message(NodeLoad(role=NODE_ROLE_DECODE, adapters=adapters))

    first, second = read("a"), read("a")
    assert first.adapters is second.adapters
    assert first.adapters != read("b").adapters
    kept = NodeReport.from_message(NodeLoad(has_same_adapters=True), first.adapters)
    assert kept.adapters is first.adapters


def test_a_report_changes_some_adapters() -> None:
    before = adapter_set(AdapterId(name, "a") for name in ("poet", "bard", "muse"))

    def after(**digests: str) -> set[AdapterId]:
        changes = [Adapter(name=name, digest=digest) for name, digest in digests.items()]
        load = NodeLoad(has_same_adapters=True, adapter_changes=changes)
        return set(NodeReport.from_message(load, before).adapters)

    left = {AdapterId("muse", "a")}
    assert after(poet="b", bard="") == left | {AdapterId("poet", "b")}
    assert after(bard="", poet="", odd="", new="c") == left | {AdapterId("new", "c")}
    assert len(after(**{f"lora-{i}": "d" for i in range(5000)})) == 4096
