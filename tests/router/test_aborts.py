"""A router ends answers at all its decode nodes, and those that wait in it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from edge.tracing.context import TraceContext
from router.nodes.operations import aborts
from router.nodes.operations.told_aborts import ToldAborts
from router.request.request_history import RequestHistory
from router.request.trace import RequestTrace
from tandem_pb.node_pb2 import AbortCall
from tests.router.cluster import Cluster, eventually
from tests.router.factories import Fleet, report
from tests.router.fakes import stream_tokens

BODY = {"model": "demo", "prompt": "hello", "stream": True}


async def test_every_decode_node_is_asked_by_the_names_of_both_apis(cluster: Cluster) -> None:
    nodes = [await cluster.decode("d"), await cluster.decode("e")]
    prefill = await cluster.prefill()
    router = await cluster.router(*nodes, prefill)
    for path, body, names in (
        ("/abort_request", {"rid": "a", "abort_all": False}, ["a"]),
        ("/abort_requests", {"request_ids": ["a", "b"]}, ["a", "b"]),
        ("/abort_request", {"rid": "", "abort_all": True}, []),
        ("/abort_requests", {}, []),
    ):
        async with router.post(body, path=path) as response:
            assert response.status == 200
            told = {f"decode {node.target}": "aborted 1" for node in nodes}
            assert await response.json() == {"nodes": told, "router": "aborted 0"}
        for node in nodes:
            asked = node.status.aborts.pop()
            assert (sorted(asked.names), asked.all) == (names, not names)
    assert prefill.status.aborts == []
    async with router.post({"rid": ""}, path="/abort_request") as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "rid")
    async with router.post({"rid": "a"}, path="/abort_requests") as response:
        assert response.status == 400 and "request_ids" in await response.text()
    assert [node.status.aborts for node in nodes] == [[], []]


@pytest.mark.parametrize("called", ["mine", "the mine one"])
async def test_what_waits_in_the_line_goes_to_a_node_as_aborted(
    cluster: Cluster, called: str
) -> None:
    may_answer = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        await may_answer.wait()
        return await stream_tokens(1)(request)

    node = await cluster.decode("d", answer)
    router = await cluster.router(node, max_prefills_per_node=1)
    asked = [asyncio.create_task(router.text(BODY))]
    await eventually(lambda: node.num_open == 1)
    for name in ("mine", "other"):
        names = {"rid": name, "request_id": f"the {name} one"}
        asked.append(asyncio.create_task(router.text({**BODY, **names})))
    line = router.services.gates.of("demo").line
    await eventually(lambda: len(line) == 2)
    async with router.post({"rid": called}, path="/abort_request") as response:
        told = {"nodes": {f"decode {node.target}": "aborted 1"}, "router": "aborted 1"}
        assert (response.status, await response.json()) == (200, told)
    may_answer.set()
    await asyncio.gather(*asked)
    sent = {b"mine" in body: headers.get("x-tandem-aborted") for headers, body in node.requests[1:]}
    assert sent == {True: "1", False: None}
    assert "x-tandem-aborted" not in node.requests[0][0]


@pytest.mark.parametrize("body", [{"abort_all": True}, {"rid": "mine"}], ids=["all", "named"])
async def test_what_is_still_read_goes_to_a_node_as_aborted(
    cluster: Cluster, body: dict[str, Any]
) -> None:
    """Also where another router ends it. A later one of its name goes on."""
    node = await cluster.decode("d", stream_tokens(1))
    near, far = await cluster.router(node), await cluster.router(node)
    raw, may_end = json.dumps({**BODY, "rid": "mine"}).encode(), asyncio.Event()
    was_read = [asyncio.Event() for _ in range(2)]

    async def send(read: asyncio.Event) -> AsyncIterator[bytes]:
        yield raw[:9]
        read.set()
        await may_end.wait()
        yield raw[9:]

    kind = {"content-type": "application/json"}
    asked = [
        asyncio.create_task(
            router.client.post(router.url + "/v1/completions", data=send(read), headers=kind)
        )
        for router, read in zip((near, far), was_read, strict=True)
    ]
    await asyncio.gather(*(read.wait() for read in was_read))
    await eventually(lambda: near.num_open == far.num_open == 1)
    async with near.post({"rid": "other"}, path="/abort_request") as response:
        assert response.status == 200
    async with near.post(body, path="/abort_request") as response:
        assert response.status == 200
    (waiting,) = far.services.aborts.open_requests()
    await eventually(lambda: waiting.is_aborted or len(waiting.early_aborts) == 2)
    await near.text({**BODY, "rid": "mine"})
    may_end.set()
    for task in asked:
        async with await task as response:
            assert "[DONE]" in await response.text()
    assert [headers.get("x-tandem-aborted") for headers, _ in node.requests] == [None, "1", "1"]


@pytest.mark.parametrize("body", [{"abort_all": True}, {"rid": "mine"}], ids=["all", "named"])
async def test_what_a_node_has_late_ends_before_the_reply(
    cluster: Cluster, body: dict[str, Any]
) -> None:
    """The node knows nothing of the answer when it is asked first."""

    async def answer(request: web.Request) -> web.StreamResponse:
        name, aborts = request.headers["x-request-id"], node.status.aborts
        await eventually(lambda: len(aborts) > 1 and name in aborts[-1].names)
        return await stream_tokens(1)(request)

    node = await cluster.decode("d", answer)
    router = await cluster.router(node)
    asked = asyncio.create_task(router.text({**BODY, "rid": "mine"}))
    await eventually(lambda: node.num_open == 1)
    async with router.post(body, path="/abort_request") as response:
        assert (await response.json())["router"] == "aborted 0"
        assert (node.num_open, router.num_open) == (0, 0)
    first, *later = node.status.aborts
    assert (first.all, list(first.names)) == ("rid" not in body, ["mine"] if "rid" in body else [])
    assert later and all(len(one.names) == 1 and not one.all for one in later)
    assert "[DONE]" in await asked
    assert "x-tandem-aborted" not in node.requests[0][0]


async def test_what_waits_in_another_router_goes_to_a_node_as_aborted(cluster: Cluster) -> None:
    """An answer that is on its way from there ends; one that begins after the call goes on."""
    may_answer = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        name, aborts = request.headers["x-request-id"], node.status.aborts
        if "x-tandem-aborted" not in request.headers:
            await eventually(
                lambda: may_answer.is_set() or any(name in one.names for one in aborts)
            )
        return await stream_tokens(1)(request)

    node, other = await cluster.decode("d", answer), await cluster.decode("e")
    near = await cluster.router(node, other)
    far = await cluster.router(node, max_prefills_per_node=1)
    asked = [asyncio.create_task(far.text({**BODY, "rid": "mine"}))]
    await eventually(lambda: node.num_open == 1)
    line = far.services.gates.of("demo").line
    for name in ("mine", "other"):
        asked.append(asyncio.create_task(far.text({**BODY, "rid": name})))
    await eventually(lambda: len(line) == 2)
    async with near.post({"rid": "mine"}, path="/abort_request") as response:
        assert (await response.json())["router"] == "aborted 0"
    await asked[0]
    await eventually(lambda: node.num_open == 1 and len(node.requests) == 3)
    asked.append(asyncio.create_task(far.text({**BODY, "rid": "mine"})))
    await eventually(lambda: len(line) == 1)
    may_answer.set()
    await asyncio.gather(*asked)
    sent = [(json.loads(body)["rid"], "x-tandem-aborted" in told) for told, body in node.requests]
    assert sent == [("mine", False), ("mine", True), ("other", False), ("mine", False)]


async def test_a_node_alone_ends_nothing_in_a_router(cluster: Cluster) -> None:
    """It may lie: more than half of the nodes must tell of a call."""
    nodes = [await cluster.decode("d"), await cluster.decode("e"), await cluster.decode("f")]
    router = await cluster.router(*nodes)
    records = [_record("a"), _record("b")]
    record = records[0]
    here = replace(router.services.aborts, open_requests=lambda: records)
    first, second, third = (n.address for n in router.services.registry.all_nodes())
    call = AbortCall(call=7, names="a")
    for teller in (first, first):
        here.follow(teller, [call])
    assert not record.is_aborted
    here.follow(second, [call])
    assert [one.is_aborted for one in records] == [True, False]
    here.follow(first, [AbortCall(call=6, all=True)])
    here.follow(second, [AbortCall(call=6, names="c")])
    here.follow(third, [AbortCall(call=6, names="c", age_s=math.nan)])
    assert not records[1].is_aborted, "two say something else than the first"
    here.follow(first, [AbortCall(call=9, names="b")])
    router.services.registry.mark_disconnected(second)
    here.follow(third, [])
    assert not records[1].is_aborted, "two nodes are left"
    router.services.registry.mark_disconnected(third)
    here.follow(first, [])
    assert records[1].is_aborted, "the only one that is left has told it"
    records[1].is_aborted = False
    old = AbortCall(call=8, all=True, age_s=60)
    for teller in (first, second, third):
        here.follow(teller, [old])
    assert not records[1].is_aborted, "it began later"


async def test_a_router_does_not_follow_its_own_call(cluster: Cluster) -> None:
    """Nodes tell it of the call a little later: what began meanwhile is not meant."""
    nodes = [await cluster.decode("d"), await cluster.decode("e")]
    router = await cluster.router(*nodes)
    records = [_record("mine")]
    here = replace(router.services.aborts, open_requests=lambda: records)
    assert (await here.abort(["mine"]))[0] == 1
    records.append(_record("mine"))
    (asked,) = nodes[0].status.aborts
    for node in router.services.registry.all_nodes():
        here.follow(node.address, [AbortCall(call=asked.call, names=asked.names)])
    assert [one.is_aborted for one in records] == [True, False]


def test_a_frozen_node_keeps_no_router_from_a_call() -> None:
    """It has missed the call, and wakes before its reports are missed."""
    fleet = Fleet()
    first, frozen = fleet.add("first").address, fleet.add("frozen").address
    told = ToldAborts(fleet.registry)
    assert not list(told.learn(first, [AbortCall(call=1, names="a")]))
    called_at, found = fleet.clock(), []
    for i in range(8):
        fleet.clock.now += 0.25
        fleet.registry.apply_report(first, report(sequence=2 + i))
        found += told.learn(first, [])
        assert not found or fleet.clock() - called_at >= 1.0, "nodes are waited for"
    fleet.registry.apply_report(frozen, report(sequence=2))
    assert [(call.call, at) for call, at in found] == [(1, called_at)]


def test_a_call_is_as_old_as_the_node_says_that_was_not_frozen() -> None:
    fleet = Fleet()
    first, frozen = fleet.add("first").address, fleet.add("frozen").address
    told = ToldAborts(fleet.registry)
    assert not list(told.learn(first, [AbortCall(call=1, names="a")]))
    called_at = fleet.clock()
    fleet.clock.now += 0.75
    ((_, at),) = told.learn(frozen, [AbortCall(call=1, names="a")])
    assert at == called_at


def test_a_node_that_makes_a_call_older_than_it_is_spares_nothing() -> None:
    fleet = Fleet()
    addresses = [fleet.add(name).address for name in "abc"]
    told = ToldAborts(fleet.registry)
    assert not list(told.learn(addresses[0], [AbortCall(call=1, all=True, age_s=4.9)]))
    ((_, at),) = told.learn(addresses[1], [AbortCall(call=1, all=True, age_s=0.1)])
    assert at == pytest.approx(fleet.clock() - 0.1)


def _record(name: str) -> RequestHistory:
    trace = RequestTrace(TraceContext.from_headers({}), "/v1/completions")
    return RequestHistory(trace=trace, on_gap=lambda _: None, names=frozenset((name,)))


async def test_clients_with_a_key_end_nothing(cluster: Cluster) -> None:
    node = await cluster.decode()
    router = await cluster.router(node, api_keys="key")
    headers: dict[str, Any] = {"authorization": "Bearer key"}
    async with router.post({"abort_all": True}, path="/abort_request", **headers) as response:
        assert (response.status, node.status.aborts) == (403, [])


@pytest.mark.parametrize("is_frozen", [False, True])
async def test_a_node_that_does_not_answer_is_said(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_frozen: bool
) -> None:
    """The reply waits for a frozen one no longer than for answers."""
    monkeypatch.setattr(aborts, "_TIMEOUT_S", 0.1)
    node = await cluster.decode()
    router = await cluster.router(node)
    if is_frozen:
        node.status.may_act.clear()
    else:
        await node.stop()
    async with router.post({"abort_all": True}, path="/abort_request") as response:
        assert response.status == 503
        why = "DEADLINE_EXCEEDED" if is_frozen else "UNAVAILABLE"
        assert (await response.json())["nodes"] == {f"decode {node.target}": f"failed: {why}"}
