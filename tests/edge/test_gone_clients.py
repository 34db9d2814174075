"""Clients that reset their connections are gone at once, though nothing reads from them."""

from __future__ import annotations

import asyncio
import socket
import struct

import uvicorn
from starlette.types import Receive, Scope, Send

from edge.http.connection.client_connection import GONE
from edge.http.connection.guarded_protocol import ConnectionLimits, guarded_protocol
from engine.node.http_server import listen

TIMEOUT_S = 30.0
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)
"""Lingers for no time: what closes a connection then resets it."""


async def test_a_connection_that_was_reset_ends_while_its_body_waits() -> None:
    asked, left = asyncio.Event(), asyncio.Event()
    reads = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.set()
        await scope["state"][GONE]
        reads.append(await receive())
        left.set()

    listener = listen("127.0.0.1", 0)
    kind = guarded_protocol(ConnectionLimits())
    config = uvicorn.Config(app, http=kind, ws="none", log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            loop = asyncio.get_running_loop()
            with socket.socket() as client:
                client.setblocking(False)
                await loop.sock_connect(client, listener.getsockname())
                await loop.sock_sendall(client, HEAD + b" " * (256 << 10))
                await asked.wait()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            await left.wait()
    finally:
        server.should_exit = True
        await serving
    assert reads == [{"type": "http.disconnect"}]
