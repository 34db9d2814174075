"""Tests which nodes there are: node lists as people write them, and names that change their
mind.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import ConfigurationError
from router.make_services import OuterWorld
from router.nodes.address import NodeAddress, NodeRole, NodeSource, parse_node_list
from router.nodes.discovery import Discovery, resolve_host
from router.nodes.registry import NodeRegistry
from router.observe.metrics import RouterMetrics
from tests.awaited import until
from tests.router.cluster import Cluster
from tests.router.factories import ManualClock

PREFILL, DECODE = NodeRole.PREFILL, NodeRole.DECODE


@pytest.mark.parametrize(
    ("role", "text", "target", "status_target"),
    [
        (PREFILL, "10.0.0.1:5001", "10.0.0.1:5001", "10.0.0.1:5001"),
        (DECODE, "10.0.0.1:8101/9101", "10.0.0.1:8101", "10.0.0.1:9101"),
        (DECODE, "node-1.local:80/90", "node-1.local:80", "node-1.local:90"),
        (DECODE, "[::1]:80/90", "[::1]:80", "[::1]:90"),
    ],
)
def test_a_node_is_read(role: NodeRole, text: str, target: str, status_target: str) -> None:
    [entry] = parse_node_list(role, f" {text} ,")
    assert entry.address() == NodeAddress(role, target, status_target)
    assert entry.source is NodeSource.STATIC


def test_a_name_stands_for_a_node_at_each_address() -> None:
    [entry] = parse_node_list(DECODE, "dns://decode.ns.svc:8101/9101")
    assert entry.source is NodeSource.DNS
    assert entry.address("10.0.0.7") == NodeAddress(DECODE, "10.0.0.7:8101", "10.0.0.7:9101")
    assert entry.address("fd00::7").target == "[fd00::7]:8101"


@pytest.mark.parametrize(
    ("role", "text"),
    [
        (DECODE, "10.0.0.1:8101"),
        (DECODE, "10.0.0.1/9101"),
        (PREFILL, "10.0.0.1"),
        (PREFILL, ":5001"),
        (PREFILL, "host:0"),
        (PREFILL, "host:65536"),
        (PREFILL, "host:５００１"),
        (PREFILL, "host:http"),
        (PREFILL, "dns://:5001"),
        (DECODE, "h:1/2/3"),
        (PREFILL, "a:1,b:2,a:1"),
    ],
)
def test_a_node_list_that_cannot_be_read_is_named(role: NodeRole, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--{role}"):
        parse_node_list(role, text)


@settings(deadline=None)
@given(st.text(max_size=40), st.sampled_from([PREFILL, DECODE]))
def test_any_text_is_read_or_refused(text: str, role: NodeRole) -> None:
    try:
        entries = parse_node_list(role, text)
    except ConfigurationError:
        return
    assert all(0 < entry.port < 65536 for entry in entries)


class Names:
    """A resolver whose answers the test decides. `None`: it fails."""

    def __init__(self, *hosts: str) -> None:
        self.hosts: Sequence[str] | None = hosts

    async def __call__(self, name: str) -> Sequence[str]:
        if self.hosts is None:
            raise OSError("no such name")
        return self.hosts


class Watched:
    """A discovery under a manual clock; `members` is what it last announced."""

    def __init__(self, text: str, resolve: Names) -> None:
        self.clock = ManualClock()
        self.metrics = RouterMetrics(NodeRegistry())
        self.alive: set[str] = set()
        self.announced: list[set[str]] = []
        self.discovery = Discovery(
            parse_node_list(PREFILL, text),
            lambda members, _leaving: self.announced.append({m.target for m in members}),
            lambda where: where.target in self.alive,
            self.metrics.discovery_failures.inc,
            resolve=resolve,
            clock=self.clock,
        )

    async def after(self, seconds: float) -> set[str]:
        self.clock.now += seconds
        for entry in self.discovery.dynamic:
            await self.discovery.look(entry)
        return self.announced[-1]

    @property
    def num_failures(self) -> float | None:
        return self.metrics.registry.get_sample_value("tandem_router_discovery_failures_total")


async def test_static_nodes_are_announced_once_and_need_no_loop() -> None:
    watched = Watched("a:1,b:1", Names())
    await watched.discovery.run()
    assert watched.announced == [{"a:1", "b:1"}]


async def test_a_name_whose_servers_are_silent_holds_up_no_other() -> None:
    asked = Counter[str]()

    class Some(Names):
        async def __call__(self, name: str) -> Sequence[str]:
            asked[name] += 1
            if name == "silent":
                await asyncio.Event().wait()
            return ["10.0.0.1"]

    watched = Watched("s:1,dns://silent:5,dns://well:6", Some())
    watched.discovery._interval_s = 0.001
    running = asyncio.create_task(watched.discovery.run())
    await until(lambda: asked["well"] > 3)
    running.cancel()
    assert watched.announced == [{"s:1"}, {"s:1", "10.0.0.1:6"}] and asked["silent"] == 1


async def test_new_addresses_join_and_vanished_ones_leave() -> None:
    names = Names("10.0.0.1")
    watched = Watched("s:1,dns://p:5", names)
    assert await watched.after(0) == {"s:1", "10.0.0.1:5"}
    names.hosts = ["10.0.0.1", "10.0.0.2"]
    assert await watched.after(5) == {"s:1", "10.0.0.1:5", "10.0.0.2:5"}
    names.hosts = ["10.0.0.2"]
    assert await watched.after(5) == {"s:1", "10.0.0.2:5"}
    await watched.after(5)
    assert len(watched.announced) == 3, "announced although nothing changed"


@pytest.mark.parametrize("answer", [None, ()], ids=["failed", "empty"])
async def test_no_answer_never_empties_the_pool(answer: Sequence[str] | None) -> None:
    names = Names("10.0.0.1", "10.0.0.2")
    watched = Watched("dns://p:5", names)
    before = await watched.after(0)
    names.hosts = answer
    for _ in range(200):
        assert await watched.after(5) == before
    assert watched.num_failures == 200


async def test_the_log_names_who_came_and_who_went_and_not_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A line of a thousand addresses for each pod that rolls would be most of the log."""
    hosts = [f"10.0.{i // 250}.{i % 250}" for i in range(1000)]
    names = Names(*hosts)
    watched = Watched("dns://svc:5", names)
    with caplog.at_level(logging.INFO, "router.nodes.discovery"):
        await watched.after(0)
        [first] = caplog.messages
        caplog.clear()
        names.hosts = [*hosts[1:], "10.9.9.9"]
        await watched.after(31)
        [change] = caplog.messages
        caplog.clear()
        await watched.after(5)
    assert first.startswith("1000 members: +10.0.0.0:5 ") and first.endswith(" and 950 more")
    assert change == "1000 members: +10.9.9.9:5 -10.0.0.0:5"
    assert not caplog.messages


async def test_a_node_that_still_reports_outlives_its_name_for_a_while() -> None:
    names = Names("10.0.0.1", "10.0.0.2")
    watched = Watched("dns://p:5", names)
    await watched.after(0)
    watched.alive = {"10.0.0.1:5"}
    names.hosts = ["10.0.0.2"]
    assert await watched.after(29) == {"10.0.0.1:5", "10.0.0.2:5"}
    assert await watched.after(2) == {"10.0.0.2:5"}
    names.hosts = ["10.0.0.1", "10.0.0.2"]
    await watched.after(1)
    names.hosts = ["10.0.0.2"]
    watched.alive.clear()
    assert await watched.after(1) == {"10.0.0.2:5"}


async def test_time_without_answers_is_no_time_without_a_name() -> None:
    names = Names("10.0.0.1", "10.0.0.2")
    watched = Watched("dns://p:5", names)
    before = await watched.after(0)
    watched.alive = {"10.0.0.1:5"}
    names.hosts = None
    for _ in range(12):
        assert await watched.after(5) == before
    names.hosts = ["10.0.0.2"]
    assert await watched.after(5) == before
    assert await watched.after(30) == {"10.0.0.2:5"}


async def test_localhost_resolves() -> None:
    assert "127.0.0.1" in await resolve_host("localhost")


async def test_nodes_found_by_name_serve_and_join_while_running(cluster: Cluster) -> None:
    decode, prefill = await cluster.decode(), await cluster.prefill()
    names = Names()
    http_port, status_port = decode.entry.removeprefix("127.0.0.1:").split("/")
    router = await cluster.router(
        world=OuterWorld(resolve=names),
        decode=f"dns://decode:{http_port}/{status_port}",
        prefill=f"dns://prefill:{prefill.status_port}",
        dns_interval_s=0.05,
    )
    async with router.post({"prompt": "x"}) as response:
        assert response.status == 503
    names.hosts = ["127.0.0.1"]
    await router.wait_usable(decode=1, prefill=1)
    await router.text({"prompt": "x"})
    assert decode.requests[0][0]["x-prefiller-host-port"] == prefill.target
    names.hosts = ()
    await router.text({"prompt": "x"})
