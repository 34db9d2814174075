"""Operators take nodes out of use and back: every router follows, and nothing that runs is lost."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.config import RouterSettings
from router.make_scaling import make_scaling
from router.nodes.address import NodeRole
from router.nodes.node import Node, NodeState
from router.placement.tandem_policy import TandemPolicy
from tests.router.cluster import TIMEOUT_S, Cluster, RunningRouter, eventually
from tests.router.factories import Fleet, report, request
from tests.router.fakes import event, open_stream
from tests.router.processes import ready_line, router_process

PREFILL, DECODE = NodeRole.PREFILL, NodeRole.DECODE
SHARING = {"serves_prefixes": True, "fingerprint": "f"}
BODY = {"model": "demo", "prompt": "hello", "stream": True}


# Placement ---------------------------------------------------------------------------------------


def tell(fleet: Fleet, node: Node, *, drained: bool, **fields: Any) -> None:
    assert node.report is not None
    sequence = node.report.sequence + 1
    said = {**SHARING, **fields, "draining": drained, "drained": drained, "sequence": sequence}
    fleet.registry.take_report(node.address, report(node.address.role, **said))


def test_sessions_move_away_and_come_back() -> None:
    fleet = Fleet()
    for name, role in (("d0", DECODE), ("d1", DECODE), ("p0", PREFILL), ("p1", PREFILL)):
        fleet.add(name, role, **SHARING)
    policy = TandemPolicy(fleet.registry, random.Random(1))
    turn = request(session_key=b"s", num_prompt_tokens=5000, tokens_per_block=1000.0)
    home = policy.place(turn).prefills[0]
    assert policy.place(turn).prefills[0] is home
    tell(fleet, home, drained=True)
    assert fleet.registry.state(home) is NodeState.DRAINED
    for _ in range(20):
        assert home not in policy.place(turn).prefills
    tell(fleet, home, drained=False)
    assert fleet.registry.state(home) is NodeState.READY
    assert home in {node for _ in range(20) for node in policy.place(turn).prefills}
    tell(fleet, fleet.node("d0"), drained=True)
    assert {policy.place(turn).decode for _ in range(20)} == {fleet.node("d1")}


@pytest.mark.parametrize(
    ("by_call", "connected", "is_named"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_what_a_drained_node_has_is_still_pulled(
    by_call: bool, connected: bool, is_named: bool
) -> None:
    fleet = Fleet()
    for name, role in (("d", DECODE), ("p0", PREFILL), ("p1", PREFILL)):
        fleet.add(name, role, **SHARING)
    policy = TandemPolicy(fleet.registry, random.Random(1))
    holder = fleet.node("p1")
    tell(fleet, holder, drained=False, recent_prefixes=(3,))
    said = {**SHARING, "draining": True, "drained": by_call, "sequence": 3}
    fleet.registry.take_report(holder.address, report(PREFILL, **said))
    if not connected:
        fleet.registry.mark_disconnected(holder.address)
    turn = request(prefix_blocks=(1, 2, 3, 4), num_prompt_tokens=4010, tokens_per_block=1000.0)
    placement = policy.place(turn)
    assert placement.prefills == (fleet.node("p0"),)
    assert placement.prefix_holder is (holder if is_named else None)


def test_autoscalers_get_its_replica_on_top() -> None:
    fleet = Fleet()
    for name, role in (("d", DECODE), ("p0", PREFILL), ("p1", PREFILL)):
        fleet.add(name, role, **SHARING)
    signals = make_scaling(RouterSettings(slo_ttft_ms=1000.0, num_routers=2), fleet.registry)
    signal = signals.of("demo")
    fleet.clock.now += 130
    for node in (*fleet.registry.nodes(PREFILL), fleet.node("d")):
        tell(fleet, node, drained=False, prefill_tokens_per_s=1e4)
    before = signal.desired(PREFILL)
    tell(fleet, fleet.node("p0"), drained=True, prefill_tokens_per_s=1e4)
    assert before is not None and signal.desired(PREFILL) == before + 1 / 2
    assert signal.nodes(PREFILL) == [fleet.node("p1")]
    tell(fleet, fleet.node("p1"), drained=True, prefill_tokens_per_s=1e4)
    assert signal.predicted_ttft_s() is None, "nothing computes"
    signal.held(1)
    assert signal.desired(PREFILL) == 1 / 2 + 2 / 2, "one in use, beside two that are not"


# The call of operators ---------------------------------------------------------------------------


async def call(router: RunningRouter, node: str, what: str) -> tuple[int, Any]:
    async with router.client.post(f"{router.url}/admin/nodes/{node}/{what}") as response:
        return response.status, await response.json()


async def listed(client: aiohttp.ClientSession, url: str) -> dict[str, str]:
    async with client.get(f"{url}/admin/nodes") as response:
        assert response.status == 200
        return {node["id"]: node["state"] for node in (await response.json())["nodes"]}


async def test_a_node_is_drained_and_taken_back(cluster: Cluster) -> None:
    prefill, one, two = (
        await cluster.prefill("p"),
        await cluster.decode("d1"),
        await cluster.decode("d2"),
    )
    router = await cluster.router(prefill, one, two)
    for node, name in ((one, "d1"), (prefill, prefill.target)):
        assert await listed(router.client, router.url) == dict.fromkeys(("p", "d1", "d2"), "ready")
        status, answer = await call(router, name, "drain")
        assert (status, answer["state"], answer["changed"]) == (200, "drained", True)
        assert answer["node"] == node.target and node.status.load.drained
        status, answer = await call(router, name, "drain")
        assert (status, answer["state"], answer["changed"]) == (200, "drained", False)
        labels = {"tier": answer["role"], "node": node.target}
        assert router.metric("tandem_router_node_drained", **labels) == 1
        assert router.metric("tandem_router_nodes", tier=answer["role"], state="drained") == 1
        async with router.client.get(f"{router.url}/status?format=json") as response:
            states = [node["state"] for node in (await response.json())["nodes"]]
        assert sorted(states) == ["drained", "ready", "ready"]
        one.requests.clear()
        two.requests.clear()
        for _ in range(5):
            await router.text(BODY)
        if node is one:
            assert (len(one.requests), len(two.requests)) == (0, 5)
            assert all(prefill.target in str(headers) for headers, _ in two.requests)
        else:
            sent = (*one.requests, *two.requests)
            assert len(sent) == 5
            assert not any(prefill.target in str(headers) for headers, _ in sent)
        status, answer = await call(router, name, "resume")
        assert (status, answer["state"], answer["changed"]) == (200, "ready", True)
        assert router.metric("tandem_router_node_drained", **labels) == 0


async def test_what_operators_are_refused(cluster: Cluster) -> None:
    stops, dies = await cluster.decode("stops"), await cluster.decode("dies")
    router = await cluster.router(stops, dies)
    status, answer = await call(router, "nobody", "drain")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    assert stops.target in answer["error"]["message"]
    await stops.status.change(draining=True)
    for what in ("drain", "resume"):
        status, answer = await call(router, "stops", what)
        assert (status, answer["error"]["code"]) == (400, "nodes_refused")
        assert "this node stops" in answer["error"]["message"]
    await dies.stop()
    status, answer = await call(router, "dies", "drain")
    assert (status, answer["error"]["code"]) == (503, "nodes_away")
    assert dies.target in answer["error"]["message"]
    assert (await listed(router.client, router.url))["dies"] != "drained"


async def test_a_node_that_has_not_reported_is_away(cluster: Cluster) -> None:
    router = await cluster.router(prefill="127.0.0.1:1")
    status, answer = await call(router, "127.0.0.1:1", "drain")
    assert (status, answer["error"]["code"]) == (503, "nodes_away")
    assert await listed(router.client, router.url) == {"": "joining"}
    status, answer = await call(router, "nosuch", "drain")
    assert status == 404 and "there are 127.0.0.1:1 (joining)" in answer["error"]["message"]


async def test_keys_of_clients_only_list(cluster: Cluster) -> None:
    decode = await cluster.decode("d")
    router = await cluster.router(decode, api_keys="secret")
    url, headers = f"{router.url}/admin/nodes", {"authorization": "Bearer secret"}
    async with router.client.get(url) as response:
        assert response.status == 401
    async with router.client.get(url, headers=headers) as response:
        assert response.status == 200
    async with router.client.post(f"{url}/d/drain", headers=headers) as response:
        assert response.status == 403
        assert "--admin-port" in (await response.json())["error"]["message"]
    assert not decode.status.load.drained


async def test_two_routers_agree_and_a_router_that_starts_later_does(cluster: Cluster) -> None:
    """A router process takes the call, another follows, and so does one that starts afterwards."""
    gate = asyncio.Event()

    async def held(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(event(0))
        await gate.wait()
        await response.write(event(1))
        return response

    busy, free = await cluster.decode("busy", held), await cluster.decode("free")
    other = await cluster.router(busy, free)
    args = ("--decode", f"{busy.entry},{free.entry}")
    async with router_process(*args) as process, aiohttp.ClientSession() as client:
        line = await ready_line(process)
        url = f"http://{line['host']}:{line['port']}"
        async with asyncio.timeout(TIMEOUT_S):
            while set((await listed(client, url)).values()) != {"ready"}:
                await asyncio.sleep(0.02)
        async with other.client.post(f"{other.url}/admin/nodes/free/drain") as response:
            assert response.status == 200
        async with asyncio.timeout(TIMEOUT_S):
            while (await listed(client, url))["free"] != "drained":
                await asyncio.sleep(0.02)
        async with client.post(url + "/v1/completions", json=BODY) as running:
            assert await running.content.readany() == event(0)
            for name, what in (("free", "resume"), ("busy", "drain")):
                async with client.post(f"{url}/admin/nodes/{name}/{what}") as response:
                    assert response.status == 200, await response.text()
            await eventually(
                lambda: (
                    [n.address.target for n in other.services.registry.usable(DECODE)]
                    == [free.target]
                )
            )
            for _ in range(3):
                async with client.post(url + "/v1/completions", json=BODY) as response:
                    assert response.status == 200 and b"[DONE]" in await response.read()
            assert len(busy.requests) == 1
            gate.set()
            assert await running.read() == event(1), "what runs there ends there"
    late = await cluster.router(decode=args[1])
    async with asyncio.timeout(TIMEOUT_S):
        while await listed(late.client, late.url) != {"busy": "drained", "free": "ready"}:
            await asyncio.sleep(0.02)
