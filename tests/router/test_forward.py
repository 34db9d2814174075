"""Requests through a real router to nodes on loopback: passing on, and trying again."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from router.relay.attempts.retry_budget import RetryBudget
from router.request.proxied_path import PROXIED_PATHS
from tests.router.cluster import TIMEOUT_S, Cluster, RunningRouter, eventually
from tests.router.fakes import (
    answer_json,
    break_after,
    event,
    never_answer,
    open_stream,
    stream_tokens,
)

BODY = {"model": "demo", "prompt": "hello", "stream": True}
DONE = b"data: [DONE]\n\n"
FULL = b"".join(event(i) for i in range(3)) + DONE


async def test_a_stream_passes_unchanged(cluster: Cluster) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode(handler=stream_tokens(3))
    router = await cluster.router(prefill, decode)
    async with router.post(BODY, x_request_id="abc-1", x_session_id="s1") as response:
        assert response.status == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["x-request-id"] == "abc-1"
        assert await response.read() == FULL
    [(headers, sent)] = decode.requests
    assert json.loads(sent) == BODY
    assert headers["x-request-id"] == "abc-1"
    assert headers["x-session-id"] == "s1"
    assert headers["x-prefiller-host-port"] == prefill.target
    assert router.metric("tandem_router_requests_total", path="/v1/completions", status="200") == 1


async def test_each_of_several_prompts_has_prefill_nodes_of_its_own(cluster: Cluster) -> None:
    prefills = [await cluster.prefill(), await cluster.prefill()]
    decode = await cluster.decode(handler=stream_tokens(3))
    router = await cluster.router(*prefills, decode)
    prompts = ["a" * 5000, "b" * 5000]
    async with router.post({**BODY, "prompt": prompts}) as response:
        assert response.status == 200
        await response.read()
    [(headers, _)] = decode.requests
    first = headers["x-prefiller-host-port"].split(",")
    prefix, _, second = headers["x-tandem-prompt-places"].partition("/")
    assert sorted(first) == sorted(second.split(",")) == sorted(one.target for one in prefills)
    assert first[0] != second.split(",")[0]
    assert len(prefix) == 16 and prefix != headers["x-tandem-prefix"]


async def test_a_plain_answer_and_its_status_pass_unchanged(cluster: Cluster) -> None:
    answer = {"error": {"message": "too long", "type": "invalid_request_error"}}
    decode = await cluster.decode(
        handler=answer_json(400, answer, {"x-tandem-prefill-node": "local", "x-secret": "1"})
    )
    router = await cluster.router(decode)
    async with router.post({"model": "demo", "messages": []}, path="/v1/chat/completions") as got:
        assert got.status == 400
        assert await got.json() == answer
        assert got.headers["x-tandem-prefill-node"] == "local"
        assert "x-secret" not in got.headers
    assert "x-prefiller-host-port" not in decode.requests[0][0]


@pytest.mark.parametrize(
    "path", [entry.path for entry in PROXIED_PATHS.values() if entry.generates]
)
async def test_whatever_generates_is_placed_and_journaled(cluster: Cluster, path: str) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode(handler=stream_tokens(3))
    router = await cluster.router(prefill, decode)
    async with router.post({"model": "demo"}, path=path) as got:
        assert (got.status, await got.read()) == (200, FULL)
    headers = decode.requests[0][0]
    assert headers["x-prefiller-host-port"] == prefill.target
    assert headers["x-tandem-journal"] == "1"
    assert router.metric("tandem_router_requests_total", path=path, status="200") == 1


@pytest.mark.parametrize(
    "path", [entry.path for entry in PROXIED_PATHS.values() if not entry.generates]
)
async def test_what_generates_nothing_takes_no_slot(cluster: Cluster, path: str) -> None:
    """Even while all slots are taken it is answered, by a decode node alone, another one if the
    first is lost."""
    answer = {"tokens": [1, 2]}
    prefill, decode = await cluster.prefill(), await cluster.decode("a", handler=never_answer())
    router = await cluster.router(prefill, decode, max_prefills_per_node=1)
    blocked = asyncio.create_task(router.text(BODY))
    await eventually(lambda: decode.num_open == 1)
    decode.handler = answer_json(200, answer)
    async with router.post({"model": "demo", "prompt": "hello"}, path=path) as got:
        assert (got.status, await got.json()) == (200, answer)
    headers = decode.requests[-1][0]
    assert not {"x-prefiller-host-port", "x-tandem-journal"} & headers.keys()
    blocked.cancel()


async def test_what_generates_nothing_counts_as_a_request_of_its_tenant(
    cluster: Cluster, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"key").hexdigest()
    file.write_text(
        f'[[tenants]]\nname = "one"\nkeys = ["sha256:{digest}"]\nrequests_per_s = 0.01\n'
    )
    decode = await cluster.decode(handler=answer_json(200, {}))
    router = await cluster.router(decode, api_key_file=file)
    key = {"authorization": "Bearer key"}
    statuses = []
    for _ in range(4):
        async with router.post({"model": "demo"}, path="/tokenize", **key) as got:
            statuses.append(got.status)
    assert statuses == [200, 200, 429, 429], "the second one goes into debt"


async def test_what_a_node_refuses_costs_its_tenant_no_tokens(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Clients that ask for the longest answer there is would be out for hours otherwise."""
    file = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"key").hexdigest()
    file.write_text(f'[[tenants]]\nname = "one"\nkeys = ["sha256:{digest}"]\ntokens_per_s = 0.01\n')
    decode = await cluster.decode(handler=answer_json(400, {"error": {"message": "too long"}}))
    router = await cluster.router(decode, api_key_file=file)
    key = {"authorization": "Bearer key"}
    for _ in range(3):
        async with router.post({**BODY, "max_tokens": 2**31 - 1}, **key) as got:
            assert got.status == 400
    decode.handler = stream_tokens(3)
    statuses = []
    for _ in range(2):
        async with router.post(BODY, **key) as got:
            statuses.append(got.status)
            await got.read()
    assert statuses == [200, 429], "an answer goes into debt"


async def test_only_chosen_headers_reach_a_node(cluster: Cluster) -> None:
    decode = await cluster.decode()
    router = await cluster.router(decode, node_api_key="inner")
    await router.text(
        BODY,
        x_prefiller_host_port="evil:1",
        authorization="Bearer mine",
        cookie="a=b",
        x_tandem_timeline="1",
        x_request_id="not plain!",
    )
    headers, _ = decode.requests[0]
    assert "x-prefiller-host-port" not in headers
    assert "cookie" not in headers
    assert headers["authorization"] == "Bearer inner"
    assert headers["x-tandem-timeline"] == "1"
    assert len(headers["x-request-id"]) == 32


async def send_until_retried(router: RunningRouter, reason: str, answer: bytes) -> int:
    """Returns how many requests it took, all answered: the choice between two idle nodes is
    drawn.
    """
    for num_sent in range(1, 65):
        assert (await router.text(BODY)).encode() == answer
        if router.metric("tandem_router_retries_total", reason=reason) >= 1:
            return num_sent
    raise AssertionError(f"nothing was retried as {reason}")


async def test_another_node_is_tried_when_one_refuses_connections(cluster: Cluster) -> None:
    dead, alive = await cluster.decode("dead"), await cluster.decode("alive")
    router = await cluster.router(dead, alive)
    await dead.stop_http()
    num_sent = await send_until_retried(router, "unreachable", FULL)
    assert len(alive.requests) == num_sent


@pytest.mark.parametrize("beginning", [(), (b"",)], ids=["no head", "head only"])
async def test_another_node_is_tried_when_one_dies_before_its_first_byte(
    cluster: Cluster, beginning: tuple[bytes, ...]
) -> None:
    dying = await cluster.decode("dying", break_after(*beginning))
    alive = await cluster.decode("alive")
    router = await cluster.router(dying, alive)
    await send_until_retried(router, "lost", FULL)


async def test_a_plain_answer_that_breaks_off_is_tried_again(cluster: Cluster) -> None:
    dying = await cluster.decode("dying", break_after(b'{"choices": [', stream=False))
    alive = await cluster.decode("alive", answer_json(200, {"choices": []}))
    router = await cluster.router(dying, alive)
    await send_until_retried(router, "lost", json.dumps({"choices": []}).encode())


async def test_after_the_first_byte_a_lost_node_ends_in_an_error_event(cluster: Cluster) -> None:
    half = b'data: {"half'
    dying = await cluster.decode("dying", break_after(event(0), half))
    router = await cluster.router(dying)
    alive = await cluster.decode("alive")
    async with router.post(BODY) as response:
        got = await response.read()
    assert got.startswith(event(0) + b'data: {"error":')
    assert half not in got
    assert DONE not in got
    assert json.loads(got.split(b"data: ")[-1])["error"]["code"] == "node_lost"
    assert len(dying.requests) == 1
    assert not alive.requests
    assert router.metric("tandem_router_broken_streams_total") == 1
    assert router.metric("tandem_router_retries_total", reason="lost") == 0


async def test_a_large_plain_answer_that_breaks_off_cuts_the_connection(cluster: Cluster) -> None:
    large = b"x" * (2 << 20)
    router = await cluster.router(await cluster.decode("d", break_after(large, stream=False)))
    with pytest.raises(Exception, match="payload|Not enough|Connection|disconnect"):
        async with router.post(BODY) as response:
            await response.read()


@pytest.mark.parametrize("status", [503, 429], ids=["draining", "full"])
async def test_a_node_that_cannot_take_a_request_hands_it_on(cluster: Cluster, status: int) -> None:
    refusal = answer_json(status, {"error": {"message": "not now"}}, {"retry-after": "7"})
    leaving, staying = await cluster.decode("leaving", refusal), await cluster.decode("staying")
    router = await cluster.router(leaving, staying)
    await send_until_retried(router, "refused", FULL)
    assert router.metric("tandem_router_ejections_total", tier="decode") == 0


async def test_the_last_refusal_is_what_the_client_gets(cluster: Cluster) -> None:
    refusal = answer_json(503, {"error": {"message": "full"}}, {"retry-after": "7"})
    nodes = [await cluster.decode(f"d{i}", refusal) for i in range(2)]
    router = await cluster.router(*nodes)
    async with router.post(BODY) as response:
        assert response.status == 503
        assert response.headers["retry-after"] == "7"
        assert (await response.json())["error"]["message"] == "full"
    assert sorted(len(node.requests) for node in nodes) == [1, 1]


async def test_no_node_is_tried_twice_and_no_more_than_allowed(cluster: Cluster) -> None:
    nodes = [await cluster.decode(f"d{i}", break_after()) for i in range(5)]
    router = await cluster.router(*nodes, max_attempts=3)
    async with router.post(BODY) as response:
        assert response.status == 503
        assert response.headers["retry-after"]
        assert (await response.json())["error"]["code"] == "no_node_available"
    assert sorted(len(node.requests) for node in nodes) == [0, 0, 1, 1, 1]


async def _statuses(router: RunningRouter, count: int) -> list[int]:
    async def status() -> int:
        async with router.post(BODY) as response:
            await response.read()
            return int(response.status)

    return list(await asyncio.gather(*(status() for _ in range(count))))


async def test_all_that_wait_on_a_node_that_dies_are_saved(cluster: Cluster) -> None:
    all_wait, answer = asyncio.Event(), stream_tokens(3)

    async def answer_later(request: web.Request) -> web.StreamResponse:
        await all_wait.wait()
        return await answer(request)

    dying = await cluster.decode("dying", never_answer())
    alive = await cluster.decode("alive", answer_later)
    router = await cluster.router(dying, alive)
    asking = asyncio.create_task(_statuses(router, 100))
    await eventually(lambda: alive.num_open + dying.num_open == 100)
    assert dying.num_open > 30
    all_wait.set()
    await dying.stop()
    assert set(await asking) == {200}
    assert len(alive.requests) == 100


async def test_the_budget_bounds_retries_when_all_nodes_fail(cluster: Cluster) -> None:
    nodes = [await cluster.decode(f"d{i}", break_after()) for i in range(4)]
    router = await cluster.router(*nodes, retry_budget=0.2, retry_burst=10)
    for _ in range(5):
        assert set(await _statuses(router, 20)) == {503}
    attempts = sum(len(node.requests) for node in nodes)
    assert 100 < attempts <= 100 + 0.2 * 100 + 10


@given(
    st.floats(0, 1),
    st.integers(0, 20),
    st.lists(st.booleans(), max_size=300),
)
@settings(deadline=None)
def test_retries_never_exceed_burst_and_ratio(ratio: float, burst: int, steps: list[bool]) -> None:
    budget, requests, retries = RetryBudget(ratio, burst), 0, 0
    for is_request in steps:
        if is_request:
            budget.add_request()
            requests += 1
        else:
            retries += budget.try_take()
        assert retries <= burst + ratio * requests + 1e-6


async def test_all_decode_nodes_dead_is_a_clear_503_and_ends_when_one_is_back(
    cluster: Cluster,
) -> None:
    nodes = [await cluster.decode(f"d{i}") for i in range(2)]
    router = await cluster.router(*nodes)
    await router.text(BODY)
    for node in nodes:
        await node.stop()
    async with router.post(BODY) as response:
        assert response.status == 503
        assert int(response.headers["retry-after"]) >= 1
        error = (await response.json())["error"]
    assert error["type"] == "service_unavailable"
    assert "decode node" in error["message"]
    tried = re.search(r"(\d+) decode nodes did not answer", error["message"])
    assert tried is None or int(tried[1]) <= len(nodes), "tries are no nodes"
    await nodes[0].restart()
    await router.wait_usable(decode=1, prefill=0)
    assert (await router.text(BODY)).encode() == FULL


async def test_a_draining_node_gets_nothing_new_and_finishes_what_it_has(cluster: Cluster) -> None:
    gate = asyncio.Event()

    async def held(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(event(0))
        await gate.wait()
        await response.write(DONE)
        return response

    leaving = await cluster.decode("leaving", held)
    router = await cluster.router(leaving)
    async with router.post(BODY) as response:
        assert await response.content.readany() == event(0)
        await leaving.status.change(draining=True)
        await router.wait_usable(decode=0, prefill=0)
        async with router.post(BODY) as refused:
            assert refused.status == 503
            assert "1 draining" in (await refused.json())["error"]["message"]
        gate.set()
        assert await response.read() == DONE
    assert len(leaving.requests) == 1


async def test_failing_nodes_are_left_out_but_never_more_than_half(cluster: Cluster) -> None:
    fault = answer_json(500, {"error": {"message": "broken"}})
    nodes: list[Any] = [await cluster.decode(f"bad{i}", fault) for i in range(3)]
    nodes.append(await cluster.decode("good"))
    router = await cluster.router(*nodes, ejection_base_s=60.0)
    for _ in range(60):
        async with router.post(BODY) as response:
            await response.read()
    assert router.metric("tandem_router_ejections_total", tier="decode") == 2
    assert router.metric("tandem_router_nodes", tier="decode", state="ejected") == 2


async def test_a_silent_node_does_not_hold_a_request_for_ever(cluster: Cluster) -> None:
    silent = await cluster.decode("silent", never_answer())
    router = await cluster.router(silent, read_timeout_s=0.3)
    async with router.post(BODY) as response:
        assert response.status == 503
    await eventually(lambda: silent.num_open == 0)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_tells_the_load_of_all_nodes_to_who_asks(
    cluster: Cluster, is_stream: bool
) -> None:
    prefill = await cluster.prefill()
    decodes = [await cluster.decode(name) for name in ("a", "b")]
    router = await cluster.router(prefill, *decodes)
    await prefill.status.change(num_waiting_requests=3)
    await decodes[0].status.change(num_free_blocks=500, num_waiting_requests=1)
    await decodes[1].status.change(num_free_blocks=750, num_waiting_requests=2)
    asked = {"model": "demo", "prompt": "x", "stream": is_stream}
    wanted = "TEXT named_metrics.kv_cache_usage_perc=0.375, named_metrics.num_requests_waiting=6"

    async def told(**headers: str) -> str | None:
        async with router.post(asked, **headers) as answer:
            assert answer.status == 200
            return answer.headers.get("endpoint-load-metrics")

    async with asyncio.timeout(TIMEOUT_S):
        while await told(endpoint_load_metrics_format="TEXT") != wanted:
            """The reports are on their way."""
    assert await told() is None
    assert await told(endpoint_load_metrics_format="what") is None
