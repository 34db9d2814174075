"""Nodes that lie to a router: in their answers, in journals and in reports. Clients get the answers
that an honest node gives, and nothing of a liar is left."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil
import pytest
from aiohttp import web

from tandem_pb import node_pb2
from tests.router.cluster import Cluster, RunningRouter
from tests.router.fakes import FakeDecodeNode, Handler, never_answer
from tests.router.test_migration import BODY, migrations, once, say_at, two_nodes
from tests.router.token_server import Fault, TokenHandler, Writer, expected, texts

_HEAD = b"HTTP/1.1 %d X\r\ncontent-length: 2\r\n\r\nok"
_MOST = (1 << 32) - 1
_MOST_64 = (1 << 64) - 1
_GROWTH = 100 << 20
"""Bytes that lying reports may cost a router and the nodes of a test, which send them."""


def says(data: bytes) -> Handler:
    """Answers with bytes, whatever they are, and hangs up."""

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(data)
        await asyncio.sleep(0.01)
        request.transport.abort()
        return web.Response()

    return handler


def repeats(data: bytes) -> Fault:
    """Says the same for ever, behind the second token."""

    async def fault(writer: Writer) -> None:
        while writer.num_tokens == 2:
            await writer.write(data)
            await asyncio.sleep(0.02)

    return fault


@pytest.mark.parametrize("data", [b":\n\n", b'data: {"choices": []}\n\n'], ids=["signs", "events"])
async def test_signs_of_life_keep_no_stream(cluster: Cluster, data: bytes) -> None:
    """The answer goes on elsewhere, and counts against the node."""
    router, handler = await two_nodes(cluster, repeats(data), read_timeout_s=0.5)
    answer = (await router.text(BODY)).replace('data: {"choices": []}\n\n', "")
    assert texts(answer) == [expected(BODY)]
    assert handler.resumed_from == [2]
    assert router.metric("tandem_router_node_failures_total", reason="lost") == 1


async def test_with_nobody_else_a_stream_of_signs_of_life_ends_with_an_error(
    cluster: Cluster,
) -> None:
    liar = await cluster.decode("liar", TokenHandler(fault=repeats(b":\n\n")))
    router = await cluster.router(liar, read_timeout_s=0.5, resume_timeout_s=0.1)
    assert '"code":"node_lost"' in await router.text(BODY)


async def test_a_node_that_trickles_has_its_time(cluster: Cluster) -> None:
    """A token a moment is progress; the honest node gives the rest, and nothing twice."""

    async def slowly(writer: Writer) -> None:
        if not handler.resumed_from:
            await asyncio.sleep(0.3)

    handler = TokenHandler(fault=slowly)
    nodes = [await cluster.decode(name, handler) for name in ("a", "b")]
    router = await cluster.router(*nodes, answer_timeout_s=1.0)
    assert texts(await router.text(BODY)) == [expected(BODY)]
    assert len(handler.resumed_from) == 1


async def test_a_node_that_never_begins_is_asked_no_longer(cluster: Cluster) -> None:
    router, liar = await honest_and(cluster, never_answer(), read_timeout_s=0.5)
    await check_until_asked(router, liar)


async def honest_and(
    cluster: Cluster, handler: Handler, **settings: Any
) -> tuple[RunningRouter, FakeDecodeNode]:
    liar = await cluster.decode("liar", handler)
    honest = await cluster.decode("honest", TokenHandler())
    return await cluster.router(honest, liar, **settings), liar


async def check_answers(router: RunningRouter, name: str, count: int = 4) -> None:
    for number in range(count):
        body = {**BODY, "prompt": f"{name} {number}"}
        assert texts(await router.text(body)) == [expected(body)], name


async def check_until_asked(router: RunningRouter, liar: FakeDecodeNode) -> None:
    """Checks answers until the liar was asked: of equal nodes one is chosen by chance."""
    for number in range(100):
        await check_answers(router, f"prompt {number}", 1)
        if liar.requests:
            return
    raise AssertionError("the liar was never asked")


@pytest.mark.parametrize(
    "data",
    [
        *(_HEAD % status for status in (99, 101, 204, 304, 600, 999)),
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(20_000)) + b"\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (1 << 20) + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 5\r\n\r\n{}",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000,
        b"\x00\xff" * 100,
        b"",
    ],
    ids=range(12),
)
async def test_an_answer_that_is_none_is_asked_for_elsewhere(cluster: Cluster, data: bytes) -> None:
    router, liar = await honest_and(cluster, says(data))
    await check_until_asked(router, liar)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_node_cannot_send_a_router_elsewhere(cluster: Cluster, status: int) -> None:
    visits = []

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(1)
        writer.close()

    async with await asyncio.start_server(visit, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        head = f"HTTP/1.1 {status} X\r\nlocation: http://127.0.0.1:{port}/\r\n"
        router, liar = await honest_and(cluster, says(f"{head}content-length: 0\r\n\r\n".encode()))
        await check_until_asked(router, liar)
        assert not visits


@pytest.mark.parametrize("num_tokens", [0, 5])
@pytest.mark.parametrize(
    "line", [b": x []", b": 9999999 []", b": -1 []", b":& x", b":x 99999", b":! 200", b":x -5"]
)
async def test_a_journal_that_lies_is_gone_on_with_elsewhere(
    cluster: Cluster, line: bytes, num_tokens: int
) -> None:
    fault = once(say_at(num_tokens, line + b"\ndata: {}\n\n"))
    nodes = [await cluster.decode(name, TokenHandler(fault=fault)) for name in ("a", "b")]
    router = await cluster.router(*nodes)
    assert texts(await router.text(BODY)) == [expected(BODY)]
    assert migrations(router, "gap") + migrations(router, "lost") == 1


def _many(kind: type[Any], count: int, **fields: Any) -> list[Any]:
    return [kind(**fields) for _ in range(count)]


LIES: dict[str, dict[str, Any]] = {
    "room without end": dict.fromkeys(("num_free_blocks", "num_total_blocks", "block_size"), _MOST),
    "no room": {"num_free_blocks": 0, "num_total_blocks": 0},
    "speeds that are none": {
        "prefill_tokens_per_s": float("nan"),
        "slack_tokens_per_s": 1e308,
        "seconds_since_progress": float("inf"),
        "kv_bytes_per_token": -1.0,
    },
    "work without end": {"num_waiting_tokens": _MOST_64, "num_running_requests": _MOST},
    "totals without end": {"generation_tokens": _MOST_64, "num_accepted_per_pos": [_MOST_64] * 999},
    "long names": {"node_id": "n" * (1 << 20), "version": "\x1b[2J" * (1 << 18)},
    "names without end": {"model_aliases": [f"m{i}" for i in range(50_000)]},
    "prefixes without end": {"recent_prefixes": list(range(100_000)), "serves_prefixes": True},
    "adapters without end": {
        "adapters": _many(node_pb2.Adapter, 10_000, name="a", digest="d" * 64)
    },
    "calls without end": {
        "adapter_calls": _many(
            node_pb2.AdapterCall, 10_000, name="a", path="/x" * 50, version=_MOST_64
        )
    },
    "paths without end": {
        "kv_paths": _many(node_pb2.KVPath, 10_000, prefill_node="h:1", avoided_s=1e308)
    },
    "groups without end": {"groups": _many(node_pb2.GroupLoad, 50_000, num_free_blocks=_MOST)},
    "another port": {"http_port": _MOST},
    "the other role": {"role": node_pb2.NODE_ROLE_PREFILL},
    "no role": {"role": node_pb2.NODE_ROLE_UNSPECIFIED},
    "another model's KV": {"fingerprint": "other"},
    "the end of all reports": {"sequence": _MOST_64 - 1_000},
    "the beginning": {"sequence": 0},
}
"""Fields of a report. What is told of itself is believed as far as it can do no harm to others."""


async def test_reports_that_lie_put_no_other_node_and_no_client_off(cluster: Cluster) -> None:
    honest, liar = [await cluster.decode(name, TokenHandler()) for name in ("a", "b")]
    router = await cluster.router(honest, liar, await cluster.prefill())
    truth = node_pb2.NodeLoad()
    truth.CopyFrom(liar.status.load)
    await check_answers(router, "before")
    before = psutil.Process().memory_info().rss
    for name, fields in LIES.items():
        load = liar.status.load
        sequence = load.sequence
        load.CopyFrom(truth)
        load.sequence = sequence
        for field, value in fields.items():
            if isinstance(value, list):
                getattr(load, field).extend(value)
            else:
                setattr(load, field, value)
        await liar.status.change()
        await check_answers(router, name)
        for path in ("/metrics", "/status", "/v1/models"):
            async with router.client.get(router.url + path) as answer:
                assert answer.status == 200 and await answer.read(), name
    for epoch in range(1, 50):
        await liar.status.change(epoch=epoch)
    liar.status.interval_s = 0.0
    await check_answers(router, "a flood")
    assert psutil.Process().memory_info().rss - before < _GROWTH
    await liar.stop()
    await check_answers(router, "afterwards")
