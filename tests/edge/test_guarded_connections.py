"""Connections end when they should: refused, without a key, with a body that never comes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from edge.http.connection import guarded_protocol, send_clock
from edge.http.connection.bounded_reads import bounded
from edge.http.connection.client_connection import BodyLimits, read_json_body, request_headers
from edge.http.connection.guarded_protocol import CALLER, ConnectionLimits, GuardedProtocol
from edge.http.errors import HttpError, Unauthorized, send_error
from edge.http.front import HttpFront
from edge.http.outer_edge import OuterEdge
from edge.http.request_head import RequestHead
from engine.node.http_server import HttpServer, listen

TIMEOUT_S = 30.0
KEY = b"authorization: Bearer key\r\n"
LONG_ANSWER = b"ok" * (4 << 20)


class OneKey:
    asks_for_key = True

    def admit(self, head: RequestHead) -> str | None:
        if head.path == "/health":
            return None
        if head.shown_keys() != ["key"]:
            raise Unauthorized("no such key")
        return "somebody"


@dataclass
class Service:
    port: int
    protocol: type[GuardedProtocol]
    asked: list[tuple[str, Any]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def connect(self, head: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head)
        return reader, writer

    @property
    def num_open(self) -> int:
        return sum(self.protocol.open_connections.by_address.values())

    async def until_open(self, count: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while self.num_open != count:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def service(front: HttpFront | None = None, **limits: Any) -> AsyncIterator[Service]:
    """Reads bodies of POST requests only, for 0.2 s at most. `/big` has a long answer, `/stream`
    one that does not say how long it is."""
    protocol = guarded_protocol.guarded_class(ConnectionLimits(**limits), OneKey(), front)
    listener = listen("127.0.0.1", 0)
    running = Service(listener.getsockname()[1], protocol)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        running.asked.append((scope["path"], scope["state"].get(CALLER)))
        try:
            if scope["method"] == "POST":
                headers = request_headers(scope)
                limits = BodyLimits(1000, 0.2)
                with limits.room.lease() as lease:
                    body = await read_json_body(headers, receive, limits, lease)
                running.bodies.append(body)
        except HttpError as error:
            await send_error(send, error)
            return
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for piece in (b"one ", b"", b"two"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        body = LONG_ANSWER if scope["path"] == "/big" else b"ok"
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    config = uvicorn.Config(
        OuterEdge(app, lambda: False, front),
        http=bounded(protocol, protocol.open_connections.reads),
        lifespan="off",
        log_config=None,
        ws="none",
    )
    server = HttpServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield running
    finally:
        server.should_exit = True
        async with asyncio.timeout(TIMEOUT_S):
            await serving


async def read_end(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(TIMEOUT_S):
        return await reader.read()


async def send_for_ever(writer: asyncio.StreamWriter) -> None:
    """Reads until the other side has really gone."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)


POST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
    b"content-type: application/json\r\ncontent-length: 500\r\n"
)


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts connections soon after their last answer, as tests wait for that."""
    monkeypatch.setattr(guarded_protocol, "_LINGER_S", 0.1)


async def test_a_wrong_key_is_refused_before_any_body_is_sent_or_read() -> None:
    async with service() as running:
        reader, writer = await running.connect(POST + b"authorization: Bearer wrong\r\n\r\n")
        answer = await read_end(reader)
        assert answer.startswith(b"HTTP/1.1 401 Unauthorized\r\n")
        for header in (b"www-authenticate: Bearer", b"connection: close", b"x-request-id: "):
            assert header in answer
        assert not running.asked
        await send_for_ever(writer)
        await running.until_open(0)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (POST + KEY + b"\r\n{", b"408"),
        (POST.replace(b"500", b"5000") + KEY + b"\r\n{", b"413"),
        (POST + KEY + b"content-encoding: gzip\r\n\r\n", b"415"),
        (b"GET /health HTTP/1.1\r\ncontent-length: 500\r\nhost: a\r\n\r\n", b"200"),
        (b"GET /x HTTP/1.1\r\ntransfer-encoding: chunked\r\nhost: a\r\n" + KEY + b"\r\n", b"200"),
    ],
    ids=["late", "large", "compressed", "not read", "chunked"],
)
@pytest.mark.parametrize("goes_on", [True, False])
async def test_an_answer_before_the_whole_request_ends_the_connection(
    head: bytes, status: bytes, goes_on: bool
) -> None:
    async with service() as running:
        reader, writer = await running.connect(head)
        answer = await read_end(reader)
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert b"connection: close\r\n" in answer
        if goes_on:
            await send_for_ever(writer)
        await running.until_open(0)
        writer.close()


async def test_a_request_that_was_read_whole_keeps_its_connection() -> None:
    async with service() as running:
        head = POST.replace(b"500", b"2") + KEY + b"\r\n{}"
        reader, writer = await running.connect()
        for _ in range(3):
            writer.write(head)
            answer = await reader.readuntil(b"ok")
            assert b"connection" not in answer
        assert running.asked == [("/v1/completions", "somebody")] * 3
        writer.close()


async def test_connections_without_a_key_are_few_and_the_oldest_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guarded_protocol, "_FIRST_WORDS_S", 0.0)
    async with service(max_without_key=3) as running:
        known, known_writer = await running.connect(
            b"GET /x HTTP/1.1\r\nhost: a\r\n" + KEY + b"\r\n"
        )
        await known.readuntil(b"ok")
        strangers = [await running.connect(b"GET /he") for _ in range(3)]
        await running.until_open(4)
        strangers.append(await running.connect())
        assert await read_end(strangers[0][0]) == b""
        await running.until_open(4)
        for reader, _ in strangers[1:]:
            assert not reader.at_eof()
        known_writer.write(b"GET /x HTTP/1.1\r\nhost: a\r\n" + KEY + b"\r\n")
        await known.readuntil(b"ok")
        for _, writer in [(known, known_writer), *strangers]:
            writer.close()


async def test_many_may_come_at_once_before_they_have_shown_their_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guarded_protocol, "_FIRST_WORDS_S", TIMEOUT_S)
    async with service(max_without_key=3) as running:
        clients = [await running.connect() for _ in range(20)]
        for reader, writer in clients:
            writer.write(b"GET /x HTTP/1.1\r\nhost: a\r\n" + KEY + b"\r\n")
            assert b"200" in await reader.readuntil(b"ok")
            writer.close()


@pytest.mark.parametrize("head", [b"", b"connection: close\r\n"], ids=["kept", "closed"])
async def test_who_reads_nothing_of_a_whole_answer_is_cut(
    monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(send_clock, "_WRITER_FIRST_S", 0.0)
    async with service(send_timeout_s=0.3) as running:
        with socket.create_connection(("127.0.0.1", running.port)) as client:
            client.sendall(b"GET /big HTTP/1.1\r\nhost: a\r\n" + KEY + head + b"\r\n")
            await running.until_open(1)
            await running.until_open(0)


async def test_who_reads_slowly_gets_all_of_a_long_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_clock, "_WRITER_FIRST_S", 0.0)
    limit_s = 0.5
    async with service(send_timeout_s=limit_s) as running:
        reader, writer = await running.connect(b"GET /big HTTP/1.1\r\nhost: a\r\n" + KEY + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        loop = asyncio.get_running_loop()
        began_at, num_read = loop.time(), 0
        while num_read < len(LONG_ANSWER):
            num_read += len(await reader.readexactly(len(LONG_ANSWER) // 32))
            await asyncio.sleep(limit_s / 8)
        assert loop.time() - began_at > 3 * limit_s
        writer.close()


async def test_an_empty_line_begins_a_request_that_has_to_follow_in_time() -> None:
    async with service(header_timeout_s=0.3) as running:
        reader, writer = await running.connect(b"GET /x HTTP/1.1\r\nhost: a\r\n" + KEY + b"\r\n")
        await reader.readuntil(b"ok")
        writer.write(b"\r\n")
        assert b" 408 " in await read_end(reader)
        writer.close()


async def test_time_in_which_the_service_was_held_up_is_not_the_client_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have sent the rest meanwhile. It gets as long again, once."""
    loop, ahead_s = asyncio.get_running_loop(), 0.0
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + ahead_s)
    async with service(header_timeout_s=1000.0) as running:
        late = [await running.connect(b"GET /health HT") for _ in range(2)]
        await running.until_open(2)
        ahead_s = 2000.0
        await asyncio.sleep(0.01)
        (reader, writer), (mute_reader, mute_writer) = late
        writer.write(b"TP/1.1\r\nhost: a\r\n\r\n")
        assert b" 200 OK" in await reader.readuntil(b"ok")
        ahead_s = 4000.0
        assert b" 408 " in await read_end(mute_reader)
        for one in (writer, mute_writer):
            one.close()


async def test_a_path_that_is_written_otherwise_is_not_open() -> None:
    async with service() as running:
        for path in (b"/%68ealth", b"//health", b"http://a/health", b"/x/../health"):
            reader, writer = await running.connect(b"GET " + path + b" HTTP/1.1\r\nhost: a\r\n\r\n")
            assert (await read_end(reader)).startswith(b"HTTP/1.1 401")
            writer.close()
        assert not running.asked


OFFER = KEY + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
"""Java's client offers so to speak HTTP/2."""
JSON_POST = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b'content-length: 11\r\n\r\n{"a": [12]}',
        b'transfer-encoding: chunked\r\n\r\n4;x=y\r\n{"a"\r\n7\r\n: [12]}\r\n0\r\n\r\n',
    ],
    ids=["length", "chunked"],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_a_request_that_offers_another_protocol_is_answered_with_its_body(
    sent: bytes, size: int
) -> None:
    async with service() as running:
        reader, writer = await running.connect()
        head, body, rest = (JSON_POST + OFFER + sent).partition(b"\r\n\r\n")
        for _ in range(2):
            writer.write(head + body)
            for at in range(0, len(rest), size):
                writer.write(rest[at : at + size])
                await writer.drain()
                await asyncio.sleep(0)
            assert b"200 OK" in await reader.readuntil(b"ok")
        writer.write(b"GET /y HTTP/1.1\r\nhost: a\r\n" + KEY + b"\r\n")
        await reader.readuntil(b"ok")
        assert running.bodies == [b'{"a": [12]}'] * 2
        assert [path for path, _ in running.asked] == ["/x", "/x", "/y"]
        writer.close()


async def test_requests_behind_an_offer_are_answered_in_turn() -> None:
    """No part of a body becomes a request of its own."""
    inner = b"GET /inner HTTP/1.1\r\nhost: a\r\n" + KEY + b"\r\n"
    post = JSON_POST + OFFER + b"content-length: %d\r\n\r\n" % len(inner) + inner
    get = b"GET /y HTTP/1.1\r\nhost: a\r\n" + OFFER + b"content-length: 0\r\n\r\n"
    async with service() as running:
        reader, writer = await running.connect(get + post + get + post)
        for _ in range(4):
            await reader.readuntil(b"ok")
        assert [path for path, _ in running.asked] == ["/y", "/x", "/y", "/x"]
        assert running.bodies == [inner] * 2
        writer.write(JSON_POST + OFFER + b"content-length: 00\r\n\r\n")
        await reader.readuntil(b"ok")
        assert running.bodies[2:] == [b""]
        writer.close()


@pytest.mark.parametrize("head", [b"", b"connection: keep-alive\r\n"], ids=["plain", "keep-alive"])
async def test_http_1_0_gets_answers_without_chunks(head: bytes) -> None:
    async with service() as running:
        for path, body in ((b"/stream", b"one two"), (b"/x", b"ok"), (b"/big", LONG_ANSWER)):
            reader, writer = await running.connect(
                b"GET " + path + b" HTTP/1.0\r\n" + KEY + head + b"\r\n"
            )
            got, _, answer = (await read_end(reader)).partition(b"\r\n\r\n")
            assert b" 200 OK\r\n" in got and b"connection: close" in got
            assert b"transfer-encoding" not in got
            assert answer == body
            writer.close()


async def test_what_a_closed_connection_had_asked_is_dropped() -> None:
    """Thousands of requests fit into one read; each would be work for nobody."""
    request = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
    async with service() as running:
        reader, writer = await running.connect(request * 5000)
        await reader.readuntil(b"ok")
        writer.transport.abort()
        await running.until_open(0)
        assert len(running.asked) < 5000
        num_asked = len(running.asked)
        reader, writer = await running.connect(request)
        await reader.readuntil(b"ok")
        assert len(running.asked) == num_asked + 1
        writer.close()


async def test_trailers_without_end_are_refused() -> None:
    async with service() as running:
        head = JSON_POST + KEY + b"transfer-encoding: chunked\r\n\r\n0\r\n"
        reader, writer = await running.connect(head + b"a: b\r\n" * 10_000)
        assert b" 431 " in await read_end(reader)
        writer.close()
