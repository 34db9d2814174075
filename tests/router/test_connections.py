"""Clients that trickle, flood, contradict themselves or do not read: they hurt only themselves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket

import pytest

from tests.router.cluster import TIMEOUT_S, Cluster, RunningRouter, eventually
from tests.router.fakes import answer_json, stream_forever, stream_tokens
from tests.router.token_server import TokenHandler, expected, texts

BODY = {"model": "demo", "prompt": "hello", "seed": 7, "max_tokens": 3, "stream": True}


def post(path: str) -> bytes:
    body = json.dumps(BODY).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return b"%bcontent-length: %d\r\n\r\n%b" % (head.encode(), len(body), body)


async def connect(router: RunningRouter) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = router.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def answer_to(router: RunningRouter, data: bytes) -> tuple[int, dict]:
    """Returns what comes of a connection that the router closes."""
    reader, writer = await connect(router)
    writer.write(data)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), json.loads(body)
    finally:
        writer.close()


async def test_a_client_that_closes_its_sending_side_has_hung_up(cluster: Cluster) -> None:
    """It looks as one that has gone, as long as nothing is sent to it: its answer would run on."""
    node = await cluster.decode("d", stream_forever())
    router = await cluster.router(node)
    reader, writer = await connect(router)
    writer.write(post("/v1/completions"))
    await eventually(lambda: node.num_open == 1)
    writer.write_eof()
    await eventually(lambda: (node.num_open, router.num_open) == (0, 0))
    async with asyncio.timeout(TIMEOUT_S):
        assert not (await reader.read()).endswith(b"0\r\n\r\n"), "it is cut, not complete"
    writer.close()


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400, "invalid_http"),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
            b"content-type: application/json\r\ncontent-length: 2\r\n"
            b"transfer-encoding: chunked\r\n\r\n{}",
            400,
            "invalid_http",
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
            b"content-type: application/json\r\ncontent-length: 2\r\n"
            b"content-length: 3\r\n\r\n{}",
            400,
            "invalid_http",
        ),
        (b"GET /health HTTP/1.1\r\nhost: a\r\n folded\r\n\r\n", 400, "invalid_http"),
        (b"\x00\x01\x02\x03\r\n\r\n", 400, "invalid_http"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 20_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"x: a\r\n" * 4_000 + b"\r\n", 431, "headers_too_large"),
    ],
    ids=["hosts", "both lengths", "lengths", "folded", "garbage", "url", "header", "headers"],
)
async def test_a_head_that_cannot_be_trusted_is_refused(
    cluster: Cluster, head: bytes, status: int, code: str
) -> None:
    router = await cluster.router()
    got, body = await answer_to(router, head)
    assert (got, body["error"]["code"]) == (status, code)


@pytest.mark.parametrize("num_requests", [1, 2])
async def test_garbage_behind_requests_is_refused_and_puts_nothing_into_their_answers(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, num_requests: int
) -> None:
    node = await cluster.decode(handler=stream_tokens(20, gap_s=0.001))
    router = await cluster.router(node)
    reader, writer = await connect(router)
    writer.write(post("/v1/completions") * num_requests + b"\x00\x01\x02\x03\r\n\r\n")
    async with asyncio.timeout(TIMEOUT_S):
        answers = re.split(rb"HTTP/1.1 (?=\d)", await reader.read())[1:]
    assert [answer[:3] for answer in answers] == [b"200"] * num_requests + [b"400"]
    assert all(answer.count(b"data: ") == 21 for answer in answers[:-1])
    await eventually(lambda: node.num_open == 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    writer.close()


async def test_endless_headers_are_cut_before_they_fill_memory(cluster: Cluster) -> None:
    router = await cluster.router()
    reader, writer = await connect(router)
    writer.write(b"GET /health HTTP/1.1\r\n")
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                writer.write(b"x: " + b"a" * 1000 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)
    writer.close()
    del reader


async def test_trickling_heads_are_closed_and_others_are_served(cluster: Cluster) -> None:
    node = await cluster.decode(handler=TokenHandler())
    router = await cluster.router(node, header_timeout_s=0.5)
    silent, _ = await connect(router)
    first, *rest = b"GET /health HTTP/1.1\r\nhost: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

    async def begin() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The client has sent a byte when the router accepts it: who sends nothing for so long gets
        no answer."""
        host, port = router.url.removeprefix("http://").split(":")
        client = socket.create_connection((host, int(port)))
        client.sendall(bytes([first]))
        return await asyncio.open_connection(sock=client)

    others = [await begin() for _ in range(50)]

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        reading = asyncio.create_task(reader.read())
        for byte in rest:
            writer.write(bytes([byte]))
            if reading.done():
                break
            await asyncio.wait({reading}, timeout=0.05)
        async with asyncio.timeout(TIMEOUT_S):
            answer = await reading
        writer.close()
        return answer

    trickles = asyncio.gather(*(trickle(*other) for other in others))
    for _ in range(5):
        assert texts(await router.text(BODY)) == [expected(BODY)]
    assert all(b" 408 " in answer for answer in await trickles)
    assert await silent.read() == b""


async def test_a_kept_connection_has_the_same_time_for_each_request(cluster: Cluster) -> None:
    router = await cluster.router(header_timeout_s=0.5)
    reader, writer = await connect(router)
    writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
    assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(0.8)
    assert not reader.at_eof(), "an idle connection may stay"
    writer.write(b"GET /hea")
    async with asyncio.timeout(TIMEOUT_S):
        assert b" 408 " in await reader.read()
    writer.close()


async def test_one_address_may_have_only_so_many_connections(cluster: Cluster) -> None:
    router = await cluster.router(max_connections_per_address=3)
    async with router.client.get(router.url + "/health") as response:
        assert response.status == 200
    kept = [await connect(router) for _ in range(2)]
    reader, writer = await connect(router)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    for _, other in kept:
        other.close()
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            reader, writer = await connect(router)
            writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            try:
                if b"200 OK" in await reader.read():
                    break
            except ConnectionResetError:
                continue
            finally:
                writer.close()


async def test_a_client_that_does_not_read_is_cut_and_frees_the_node(cluster: Cluster) -> None:
    node = await cluster.decode(handler=stream_forever(gap_s=0))
    other = await cluster.decode(handler=stream_forever(gap_s=0))
    router = await cluster.router(node, other, send_timeout_s=0.5)
    _, writer = await connect(router)
    writer.write(post("/v1/completions"))
    await eventually(lambda: node.num_open + other.num_open == 1)
    await eventually(lambda: node.num_open + other.num_open == 0)
    assert router.metric("tandem_router_node_failures_total", reason="lost") == 0
    await eventually(lambda: not router.server.server_state.connections)
    writer.close()


async def test_who_asks_again_without_reading_the_answer_before_is_cut(cluster: Cluster) -> None:
    node = await cluster.decode(handler=answer_json(200, "x" * 900_000))
    router = await cluster.router(node, send_timeout_s=0.5)
    host, port = router.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(post("/tokenize"))
        await eventually(lambda: len(node.requests) == 1 and router.num_open == 0)
        client.sendall(post("/v1/completions"))
        await eventually(lambda: len(node.requests) == 2)
        await eventually(lambda: router.num_open == 0)
        await eventually(lambda: not router.server.server_state.connections)


async def test_who_hangs_up_with_another_request_behind_frees_the_node(cluster: Cluster) -> None:
    node = await cluster.decode(handler=stream_forever())
    router = await cluster.router(node)
    reader, writer = await connect(router)
    writer.write(post("/v1/completions") * 2)
    async with asyncio.timeout(TIMEOUT_S):
        await reader.readuntil(b"data: ")
    assert node.num_open == 1
    writer.transport.abort()
    await eventually(lambda: node.num_open == 0)
    assert len(node.requests) == 1, "nobody is there to hear of the second one"


async def test_while_draining_clients_are_asked_to_connect_anew(cluster: Cluster) -> None:
    router = await cluster.router(await cluster.decode(handler=TokenHandler()))
    async with router.post(BODY) as response:
        assert response.headers.get("connection") != "close"
        await response.read()
    router.services.draining = True
    async with router.post(BODY) as response:
        assert response.headers["connection"] == "close"
        assert texts(await response.text()) == [expected(BODY)]


async def test_a_client_without_a_key_gets_no_further_than_its_head(cluster: Cluster) -> None:
    node = await cluster.decode()
    router = await cluster.router(node, api_keys="one")
    reader, writer = await connect(router)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
        b"content-type: application/json\r\ncontent-length: 99\r\n\r\n"
    )
    async with asyncio.timeout(TIMEOUT_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 401") and b"connection: close" in head
    assert json.loads(body)["error"]["code"] == "invalid_api_key"
    assert not node.requests
    writer.close()
