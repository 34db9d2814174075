"""Peers that vanish without a word, on a network that is cut: no listener keeps them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from edge.h2.frames import FrameKind, frame
from edge.h2.server import H2Server
from edge.http.connection.guarded_protocol import ConnectionLimits, guarded_protocol
from edge.silent_peers import set_silence_timeout
from engine.node.http_server import HttpServer, listen
from router.server import bind
from tests.awaited import until
from tests.network_namespaces import Switch, switched

TIMEOUT_S = 30.0
SILENCE_S = 1.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(FrameKind.SETTINGS, 0, 0, b"")


@pytest.fixture
def switch() -> Iterator[Switch]:
    with switched("c") as switch:
        yield switch


def here(switch: Switch) -> str:
    return switch.addresses["c"].rsplit(".", 1)[0] + ".254"


def connected(switch: Switch, port: int) -> socket.socket:
    """Returns a connection from the host that will be cut off."""
    with switch.on("c"):
        sock = socket.socket()
    sock.settimeout(TIMEOUT_S)
    sock.connect((here(switch), port))
    return sock


class Answers:
    """Answers slowly and without an end, until the client has gone."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.num_left = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        gone = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.num_begun += 1
        while not gone.done():
            await send({"type": "http.response.body", "body": b"token ", "more_body": True})
            await asyncio.wait([gone], timeout=0.05)
        assert gone.result()["type"] == "http.disconnect"
        self.num_left += 1


@asynccontextmanager
async def http_server(app: Answers, listener: socket.socket) -> AsyncIterator[uvicorn.Server]:
    """Has no other limit that could end the test's connections."""
    limits = ConnectionLimits(header_timeout_s=10 * TIMEOUT_S, send_timeout_s=10 * TIMEOUT_S)
    config = uvicorn.Config(
        app, http=guarded_protocol(limits), lifespan="off", log_config=None, ws="none"
    )
    server = HttpServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started)
        yield server
    finally:
        server.should_exit = True
        await serving


async def test_a_stream_ends_with_a_client_that_vanished(switch: Switch) -> None:
    """One is in the midst of an answer, and its tokens lie in the kernel; one says nothing."""
    app = Answers()
    listener = listen(here(switch), 0, SILENCE_S)
    port = listener.getsockname()[1]
    async with http_server(app, listener) as server:
        with connected(switch, port) as reads, connected(switch, port):
            reads.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await asyncio.to_thread(reads.recv, 1 << 10)
            await until(lambda: len(server.server_state.connections) == 2)
            switch.cut("c")
            await until(lambda: not server.server_state.connections)
            assert app.num_left == app.num_begun == 1


async def test_a_caller_that_vanished_leaves_no_connection(switch: Switch) -> None:
    server = H2Server({}, ping_after_s=SILENCE_S / 2, give_up_after_s=SILENCE_S)
    try:
        port = await server.listen(here(switch), 0)
        with connected(switch, port) as caller:
            caller.sendall(PREFACE)
            await until(lambda: len(server._connections) == 1)
            switch.cut("c")
            await until(lambda: not server._connections)
    finally:
        await server.close()


@pytest.mark.parametrize("listener_of", [bind, listen])
def test_connections_inherit_what_was_set(
    listener_of: Callable[[str, int, float], socket.socket],
) -> None:
    with listener_of("127.0.0.1", 0, 8.0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as sock:
            for option, value in (
                (socket.TCP_USER_TIMEOUT, 8000),
                (socket.TCP_KEEPIDLE, 4),
                (socket.TCP_KEEPINTVL, 2),
            ):
                assert sock.getsockopt(socket.IPPROTO_TCP, option) == value
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_short_silences_are_a_second_to_the_prober() -> None:
    with socket.socket() as sock:
        set_silence_timeout(sock, 0.2)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 200
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
