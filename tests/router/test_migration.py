"""Answers that another node goes on with: nothing is lost, repeated or changed, and clients see
nothing of it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from typing import Any

import pytest
from aiohttp import web

from tests.router.cluster import Cluster, RunningRouter, eventually
from tests.router.fakes import FakeDecodeNode, Handler, answer_json
from tests.router.token_server import COMPLETE, DONE, Fault, TokenHandler, Writer, expected, texts

COUNT = 12
BODY: dict[str, Any] = {
    "model": "demo", "prompt": "hello", "seed": 7, "max_tokens": COUNT, "stream": True,
}  # fmt: skip


def die_at(num_tokens: int) -> Fault:
    async def fault(writer: Writer) -> None:
        if writer.num_tokens == num_tokens:
            await asyncio.sleep(0.01)
            writer.abort()

    return fault


def freeze_at(num_tokens: int, thaw: asyncio.Event) -> Fault:
    async def fault(writer: Writer) -> None:
        if writer.num_tokens == num_tokens:
            await thaw.wait()

    return fault


def say_at(num_tokens: int, data: bytes) -> Fault:
    async def fault(writer: Writer) -> None:
        if writer.num_tokens == num_tokens:
            await writer.write(data)
            if data.startswith((b":!", b":x")):
                writer.request.protocol.force_close()
                raise ConnectionResetError

    return fault


def once(fault: Fault) -> Fault:
    """Acts only on the connection that it hits first."""
    hit: list[Writer] = []

    async def limited(writer: Writer) -> None:
        if not hit:
            hit.append(writer)
        if hit[0] is writer:
            await fault(writer)

    return limited


async def two_nodes(
    cluster: Cluster, fault: Fault, **settings: Any
) -> tuple[RunningRouter, TokenHandler]:
    """Whichever gets the first request is the faulty one."""
    handler = TokenHandler(fault=once(fault))
    nodes = [await cluster.decode(name, handler) for name in ("a", "b")]
    return await cluster.router(*nodes, **settings), handler


def stop_afterwards(node: FakeDecodeNode, handler: TokenHandler) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        finally:
            node.handler = answer_json(503, {"error": {"message": "gone"}})

    return handle


def migrations(router: RunningRouter, reason: str) -> float:
    return router.metric("tandem_router_migrations_total", reason=reason)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, COUNT // 2, COUNT - 1])
async def test_a_node_that_dies_at_any_token_is_replaced(cluster: Cluster, num_tokens: int) -> None:
    router, handler = await two_nodes(cluster, die_at(num_tokens))
    assert texts(await router.text(BODY)) == [expected(BODY)]
    if num_tokens:
        assert handler.resumed_from == [num_tokens]
        assert migrations(router, "lost") == 1
        for phase in ("unnoticed", "placing", "beginning", "catching_up"):
            assert router.metric("tandem_router_migration_seconds_count", phase=phase) == 1


async def test_an_answer_waits_for_room_for_a_connection(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has a part of it, and other answers give files back as they end."""
    loop = asyncio.get_running_loop()
    connect, num_refusals, has_died = loop.create_connection, 2, asyncio.Event()

    async def fault(writer: Writer) -> None:
        if writer.num_tokens == 3:
            has_died.set()
        await die_at(3)(writer)

    async def connect_if_there_is_room(*given: Any, **more: Any) -> Any:
        nonlocal num_refusals
        if has_died.is_set() and num_refusals:
            num_refusals -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await connect(*given, **more)

    router, handler = await two_nodes(cluster, fault)
    monkeypatch.setattr(loop, "create_connection", connect_if_there_is_room)
    assert texts(await router.text(BODY)) == [expected(BODY)]
    assert handler.resumed_from == [3] and num_refusals == 0


async def test_a_node_that_dies_between_the_last_token_and_the_end(cluster: Cluster) -> None:
    class Cut(TokenHandler):
        async def _stream(self, writer: Writer, *args: Any) -> None:
            write = writer.write

            async def cut(data: bytes) -> None:
                if data.endswith(b"[DONE]\n\n"):
                    await asyncio.sleep(0.01)
                    writer.abort()
                await write(data)

            writer.write = cut  # type: ignore[method-assign]
            await super()._stream(writer, *args)

    node = await cluster.decode("a", Cut())
    other = TokenHandler()
    router = await cluster.router(node)
    assert node.requests == []
    request = asyncio.create_task(router.text(BODY))
    await eventually(lambda: bool(node.requests))
    node.handler = other
    assert texts(await request) == [expected(BODY)]
    assert other.resumed_from == [COUNT]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_ends_in_order_and_too_early_goes_on(
    cluster: Cluster, stream: bool
) -> None:
    async def end(writer: Writer) -> None:
        if writer.num_tokens == 5:
            await writer.response.write_eof()
            raise ConnectionResetError

    router, handler = await two_nodes(cluster, end)
    body = {**BODY, "stream": stream}
    answer = await router.text(body)
    found = texts(answer)[0] if stream else json.loads(answer)["choices"][0]["text"]
    assert found == expected(body)
    assert handler.resumed_from == [5]


@pytest.mark.parametrize("num_tokens", [1, COUNT, 2 * COUNT - 1])
async def test_several_choices_go_on_together(cluster: Cluster, num_tokens: int) -> None:
    router, handler = await two_nodes(cluster, die_at(num_tokens))
    body = {**BODY, "n": 2}
    assert texts(await router.text(body), 2) == [expected(body, 0), expected(body, 1)]
    assert handler.resumed_from == [num_tokens]


@pytest.mark.parametrize("num_tokens", [1, COUNT - 1, COUNT])
async def test_answers_of_apis_without_done_go_on_too(cluster: Cluster, num_tokens: int) -> None:
    """Also when all but their end has come."""

    async def die(writer: Writer) -> None:
        if writer.num_events == num_tokens:
            await asyncio.sleep(0.01)
            writer.abort()

    class Dying(TokenHandler):
        async def _stream(self, writer: Writer, *args: Any) -> None:
            write = writer.write

            async def checked(data: bytes) -> None:
                await die_once(writer)
                await write(data)

            writer.write = checked  # type: ignore[method-assign]
            await super()._stream(writer, *args)

    die_once = once(die)
    handler = Dying(end=COMPLETE)
    nodes = [await cluster.decode(name, handler) for name in ("a", "b")]
    router = await cluster.router(*nodes)
    async with router.post(BODY, path="/v1/responses") as response:
        answer = await response.text()
    assert texts(answer + DONE.decode()) == [expected(BODY)]
    assert handler.resumed_from == [num_tokens]


async def test_an_answer_without_a_seed_keeps_the_draw(cluster: Cluster) -> None:
    router, handler = await two_nodes(cluster, die_at(5))
    body = {**BODY, "stream": False}
    del body["seed"]
    answer = json.loads(await router.text(body))
    assert answer["choices"][0]["text"] == expected({**body, "seed": answer["seed"]})
    assert handler.resumed_from == [5]


@pytest.mark.parametrize("num_tokens", [1, COUNT - 1])
async def test_a_plain_answer_goes_on_too(cluster: Cluster, num_tokens: int) -> None:
    router, handler = await two_nodes(cluster, die_at(num_tokens))
    body = {**BODY, "stream": False}
    async with router.post(body) as response:
        assert response.status == 200
        assert response.headers["content-type"] == "application/json"
        assert not [name for name in response.headers if "journal" in name.lower()]
        answer = await response.json()
    assert answer["choices"] == [{"index": 0, "text": expected(body)}]
    assert handler.resumed_from == [num_tokens]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_node_that_hangs_is_replaced_and_ignored_when_it_wakes(
    cluster: Cluster, stream: bool
) -> None:
    thaw = asyncio.Event()
    router, handler = await two_nodes(cluster, freeze_at(3, thaw), stream_stall_s=1.01)
    body = {**BODY, "stream": stream}
    answer = await router.text(body)
    thaw.set()
    found = texts(answer)[0] if stream else json.loads(answer)["choices"][0]["text"]
    assert found == expected(body)
    assert handler.resumed_from == [3]


async def test_a_node_that_is_slow_and_says_so_is_not_replaced(cluster: Cluster) -> None:
    async def fault(writer: Writer) -> None:
        if writer.num_tokens == 3:
            for _ in range(7):
                await asyncio.sleep(0.4)
                await writer.write(b":\n\n")

    router, handler = await two_nodes(cluster, fault, stream_stall_s=2.2)
    assert texts(await router.text(BODY)) == [expected(BODY)]
    assert handler.resumed_from == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_node_that_stops_hands_over(cluster: Cluster, stream: bool) -> None:
    error = b':! 503\ndata: {"error":{"message":"stopping"}}\n\n'
    router, handler = await two_nodes(cluster, say_at(4, error))
    body = {**BODY, "stream": stream}
    answer = await router.text(body)
    found = texts(answer)[0] if stream else json.loads(answer)["choices"][0]["text"]
    assert found == expected(body)
    assert handler.resumed_from == [4]
    assert migrations(router, "handed_over") == 1
    assert router.metric("tandem_router_node_failures_total", reason="lost") == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [400, 500])
async def test_an_error_of_the_request_itself_is_passed_on(
    cluster: Cluster, stream: bool, status: int
) -> None:
    """Only the node's own errors count as broken streams, which somebody is paged for."""
    error = b':x %d\ndata: {"error":{"message":"bad"}}\n\n' % status
    router, handler = await two_nodes(cluster, say_at(4, error))
    async with router.post({**BODY, "stream": stream}) as response:
        text = await response.text()
        assert response.status == (200 if stream else status)
        assert text.endswith('{"error":{"message":"bad"}}' + "\n\n" * stream)
        assert "[DONE]" not in text
    assert handler.resumed_from == []
    assert router.metric("tandem_router_broken_streams_total") == (status >= 500)


async def test_what_comes_twice_is_dropped(cluster: Cluster) -> None:
    again = b': 1 ["tokens",0,[1]]\ndata: {"choices":[{"index":0,"text":"AGAIN"}]}\n\n'
    router, _ = await two_nodes(cluster, say_at(4, again))
    assert texts(await router.text(BODY)) == [expected(BODY)]


async def test_what_is_missing_makes_another_node_go_on(cluster: Cluster) -> None:
    async def skip(writer: Writer) -> None:
        if writer.num_tokens == 4:
            writer.number += 1

    router, handler = await two_nodes(cluster, skip)
    assert texts(await router.text(BODY)) == [expected(BODY)]
    assert handler.resumed_from == [4]
    assert migrations(router, "gap") == 1


async def test_a_node_that_begins_again_is_not_believed(cluster: Cluster) -> None:
    """It would repeat what the client has."""

    handler = TokenHandler(fault=once(die_at(3)), forgets=True)
    nodes = [await cluster.decode(name, handler) for name in ("a", "b")]
    router = await cluster.router(*nodes, resume_timeout_s=0.3)
    text = await router.text(BODY)
    assert "[DONE]" not in text
    assert text.count('"0:') == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_with_nobody_to_go_on_the_client_is_told(cluster: Cluster, stream: bool) -> None:
    faulty = await cluster.decode("a", TokenHandler(fault=die_at(3)))
    router = await cluster.router(faulty, resume_timeout_s=0.3, max_migrations=1)
    async with router.post({**BODY, "stream": stream}) as response:
        text = await response.text()
        assert response.status == (200 if stream else 503)
        assert "[DONE]" not in text
        assert '"code":"node_lost"' in text
    assert router.metric("tandem_router_broken_streams_total") == 1


async def test_a_broken_stream_ends_in_the_form_of_its_api(cluster: Cluster) -> None:
    faulty = await cluster.decode("a", TokenHandler(fault=die_at(3)))
    router = await cluster.router(faulty, resume_timeout_s=0.3, max_migrations=1)
    url = router.url + "/v1/messages"
    async with router.client.post(url, json={**BODY, "stream": True}) as response:
        *_, last, end = (await response.text()).split("\n\n")
    name, data = last.split("\n")
    assert (name, end) == ("event: error", "")
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")


async def test_the_only_node_may_come_back(cluster: Cluster) -> None:
    handler = TokenHandler(fault=die_at(3))
    node = await cluster.decode("a", handler)
    router = await cluster.router(node)
    request = asyncio.create_task(router.text(BODY))
    await eventually(lambda: bool(node.requests))
    await node.stop()
    handler.fault = None
    await node.restart()
    assert texts(await request) == [expected(BODY)]


async def test_migrations_of_one_request_are_bounded(cluster: Cluster) -> None:
    """A request that kills its nodes does not kill all of them."""

    async def poison(writer: Writer) -> None:
        if writer.num_events == 1:
            await asyncio.sleep(0.005)
            writer.abort()

    nodes = [await cluster.decode(f"d{i}", TokenHandler(fault=poison)) for i in range(5)]
    router = await cluster.router(*nodes, max_migrations=2, ejection_failures=100)
    text = await router.text(BODY)
    assert "[DONE]" not in text
    assert sum(len(node.requests) for node in nodes) == 3


async def test_migrations_of_all_requests_are_bounded(cluster: Cluster) -> None:
    router, _ = await two_nodes(cluster, die_at(2), migration_burst=0)
    text = await router.text(BODY)
    assert "[DONE]" not in text


async def test_a_node_of_another_model_cannot_go_on(cluster: Cluster) -> None:
    handler = TokenHandler(fault=once(die_at(3)))
    nodes = [await cluster.decode(name, handler) for name in ("a", "b")]
    nodes[1].status.load.fingerprint = "f2"
    router = await cluster.router(*nodes, resume_timeout_s=0.3)
    for node in nodes:  # The one that fails does not come back.
        node.handler = stop_afterwards(node, handler)
    assert "[DONE]" not in await router.text(BODY)
    assert handler.resumed_from == []


async def test_a_full_node_is_passed_over(cluster: Cluster) -> None:
    handler = TokenHandler(fault=once(die_at(3)))
    refuse = answer_json(503, {"error": {"message": "full"}})
    num_refused = 0

    async def full_at_first(request: web.Request) -> web.StreamResponse:
        nonlocal num_refused
        if "x-tandem-resume" in request.headers and not num_refused:
            num_refused += 1
            return await refuse(request)
        return await handler(request)

    nodes = [await cluster.decode(name, full_at_first) for name in ("a", "b", "c")]
    router = await cluster.router(*nodes)
    assert texts(await router.text(BODY)) == [expected(BODY)]
    assert num_refused == 1


async def test_without_migrations_nodes_are_not_asked_for_a_journal(cluster: Cluster) -> None:
    node = await cluster.decode("a", TokenHandler())
    router = await cluster.router(node, max_migrations=0)
    assert texts(await router.text(BODY)) == [expected(BODY)]
    assert "x-tandem-journal" not in node.requests[0][0]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_nobody_can_go_on_leaves_nothing(
    cluster: Cluster, stream: bool
) -> None:
    node = await cluster.decode("a", TokenHandler(fault=die_at(3)))
    router = await cluster.router(node)
    request = asyncio.create_task(router.text({**BODY, "stream": stream}))
    await eventually(lambda: router.metric("tandem_router_node_failures_total", reason="lost") > 0)
    request.cancel()
    await asyncio.wait({request})
    await eventually(lambda: router.num_open == 0)
    assert not router.services.silence.exchanges
