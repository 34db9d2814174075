"""A port that serves TLS and plaintext tells them apart by one byte, whatever strangers send and
however slowly, on both kinds of event loop."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse

from edge.h2 import server as h2_server
from edge.h2 import tls_socket
from edge.h2.frames import client_opening
from edge.h2.server import H2Server
from edge.http.connection import http_listener
from edge.http.connection.bounded_reads import bounded
from edge.http.connection.guarded_protocol import ConnectionLimits, guarded_class
from edge.http.tls_http import TlsConfig
from edge.security.config import Role
from edge.security.credentials import Credentials
from engine.node.http_server import HttpServer, listen
from tests.security.authority import Authority, tls_config

TIMEOUT_S = 30.0
LIMIT_S = 30.0
"""Whoever falls silent is left after so long: nobody waits for that."""
Run: TypeAlias = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield lambda test: runner.run(_bounded(test))


async def _bounded(test: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await test()


@pytest.fixture
def credentials(authority: Authority) -> Credentials:
    config = tls_config(authority.service("node", Role.DECODE))
    return Credentials(replace(config, accept_missing_tls=True))


@dataclass
class Port:
    """A port of ours. `hello` is what a plaintext client says first, `answer` what it hears."""

    number: int
    hello: bytes
    answer: bytes
    credentials: Credentials
    num_waiting: Callable[[], int]
    set_limit: Callable[[float], None]
    """Says after how many seconds new ones that fall silent are left."""

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.number)

    async def said(self, words: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a connection on which these words lie when it is accepted."""
        sock = socket.create_connection(("127.0.0.1", self.number))
        sock.sendall(words)
        return await asyncio.open_connection(sock=sock)

    async def is_served(self) -> None:
        await self._answers(*await self.said(self.hello))

    async def is_served_by_tls(self) -> None:
        context = self.credentials.client_context("127.0.0.1:0")
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.number, ssl=context, server_hostname="127.0.0.1"
        )
        writer.write(self.hello)
        await self._answers(reader, writer)

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(len(self.answer)) == self.answer
        writer.close()

    async def serves_both(self) -> None:
        await self.is_served()
        await self.is_served_by_tls()


@asynccontextmanager
async def http_port(credentials: Credentials) -> AsyncIterator[Port]:
    app = PlainTextResponse("here")
    protocol = guarded_class(ConnectionLimits(header_timeout_s=LIMIT_S))
    server = HttpServer(
        TlsConfig(
            app,
            credentials.server_tls("http"),
            handshake_timeout_s=LIMIT_S,
            http=bounded(protocol, protocol.open_connections.reads),
            lifespan="off",
            log_config=None,
            ws="none",
        )
    )
    listener = listen("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    [either] = server.servers

    def set_limit(seconds: float) -> None:
        either._timeout_s = seconds
        protocol.limits = ConnectionLimits(header_timeout_s=seconds)

    hello = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
    yield Port(
        listener.getsockname()[1],
        hello,
        b"HTTP/1.1 200 OK\r\n",
        credentials,
        lambda: len(either._undecided) + len(server.server_state.connections),
        set_limit,
    )
    server.should_exit = True
    await serving


@asynccontextmanager
async def h2_port(credentials: Credentials) -> AsyncIterator[Port]:
    server = H2Server({}, tls=credentials.server_tls("kv", h2=True), ping_after_s=LIMIT_S)

    def set_limit(seconds: float) -> None:
        server._patience_s = (seconds, 25.0)
        h2_server.HANDSHAKE_S = tls_socket.HANDSHAKE_S = seconds

    yield Port(
        await server.listen("127.0.0.1", 0),
        client_opening(),
        struct.pack(">I", 12)[1:] + b"\x04",
        credentials,
        lambda: server._num_of_peer.total(),
        set_limit,
    )
    await server.close()


@pytest.fixture(params=[http_port, h2_port], ids=["http", "h2"])
def port(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(h2_server, "_CHECK_S", 0.05)
    for module in (h2_server, tls_socket):
        monkeypatch.setattr(module, "HANDSHAKE_S", LIMIT_S)
    return request.param


async def ended(reader: asyncio.StreamReader) -> None:
    """Waits for the end of a connection, however it comes."""
    try:
        while await reader.read(1 << 16):
            pass
    except ConnectionError:
        return


async def nobody_waits(port: Port) -> None:
    while port.num_waiting():
        await asyncio.sleep(0.01)


def test_who_falls_silent_is_left(run: Run, port: Any, credentials: Credentials):
    """Those who are served in between are accepted after them, and have all the time."""
    words = [b"", b"\x16", b"\x16\x03\x01", b"G", b"P", b"\x00"]

    async def test() -> None:
        async with port(credentials) as here:
            here.set_limit(0.5)
            silent = [await here.said(one) for one in words]
            await here.is_served()
            here.set_limit(LIMIT_S)
            await here.is_served_by_tls()
            here.set_limit(0.5)
            for reader, writer in silent:
                await ended(reader)
                writer.close()
            await nobody_waits(here)
            assert credentials.plaintext_connections.total() == 1 + 3

    run(test)


def test_who_leaves_without_a_word_costs_nothing(run: Run, port: Any, credentials: Credentials):
    async def test() -> None:
        async with port(credentials) as here:
            for linger in (0, 1):
                sock = socket.create_connection(("127.0.0.1", here.number))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", linger, 0))
                sock.close()
            await here.serves_both()
            await nobody_waits(here)
            assert credentials.plaintext_connections.total() == 1

    run(test)


def test_plaintext_may_come_byte_by_byte(run: Run, port: Any, credentials: Credentials):
    async def test() -> None:
        async with port(credentials) as here:
            reader, writer = await here.open()
            writer.transport.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
            )
            for byte in here.hello:
                writer.write(bytes([byte]))
                await writer.drain()
            assert await reader.readexactly(len(here.answer)) == here.answer
            writer.close()

    run(test)


def test_a_handshake_may_come_byte_by_byte(run: Run, port: Any, credentials: Credentials):
    async def test() -> None:
        async with port(credentials) as here:
            reader, writer = await here.open()
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            context = credentials.client_context("127.0.0.1:0")
            assert context is not None
            tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")

            async def until_done(step: Callable[[], Any]) -> Any:
                while True:
                    try:
                        return step()
                    except ssl.SSLWantReadError:
                        for byte in outgoing.read():
                            writer.write(bytes([byte]))
                            await writer.drain()
                        incoming.write(await reader.read(1 << 16))

            await until_done(tls.do_handshake)
            tls.write(here.hello)
            answer = await until_done(lambda: tls.read(len(here.answer)))
            assert answer == here.answer[: len(answer)] != b""
            writer.close()
            assert credentials.plaintext_connections.total() == 0

    run(test)


def test_of_many_that_say_nothing_the_oldest_go(
    run: Run, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http_listener, "_MAX_UNDECIDED", 8)

    async def test() -> None:
        async with http_port(credentials) as here:
            silent = [await here.open() for _ in range(20)]
            await here.serves_both()
            for reader, _ in silent[:10]:
                await ended(reader)
            assert here.num_waiting() <= 8
            for _, writer in silent:
                writer.close()

    run(test)


@settings(max_examples=10)
@given(words=st.binary(min_size=1, max_size=400), cut=st.integers(0, 400))
def test_no_first_words_hurt_others(authority_once: Credentials, words: bytes, cut: int) -> None:
    async def test() -> None:
        for new_port in (http_port, h2_port):
            async with new_port(authority_once) as here:
                reader, writer = await here.open()
                writer.write(words[:cut])
                await here.is_served()
                writer.write(words[cut:])
                writer.write_eof()
                await ended(reader)
                writer.close()
                await nobody_waits(here)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_bounded(test))


@pytest.fixture(scope="module")
def authority_once(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    folder = Authority(tmp_path_factory.mktemp("ours")).service("node", Role.DECODE)
    return Credentials(replace(tls_config(folder), accept_missing_tls=True))
