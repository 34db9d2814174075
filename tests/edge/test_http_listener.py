"""A turn of the event loop accepts many connections, and a server that ends has taken them."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

import uvicorn
import uvloop

from edge.http.tls_http import TlsServer
from tests.awaited import until

NUM_CLIENTS = 200
MOST_TURNS = 40
"""One connection in a turn would take one for each client."""


class Connections(asyncio.Protocol):
    num_made = 0
    num_lost = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        type(self).num_made += 1

    def connection_lost(self, error: Exception | None) -> None:
        type(self).num_lost += 1


class Server(TlsServer):
    def _protocol(self) -> asyncio.Protocol:
        return Connections()


async def accept_all(listener: socket.socket) -> int:
    """Returns the turns of the event loop in which all clients were accepted."""
    server = Server(uvicorn.Config(lambda: None, lifespan="off", log_config=None))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    num_turns = 0
    with ExitStack() as clients:
        for _ in range(NUM_CLIENTS):
            clients.enter_context(socket.create_connection(listener.getsockname()))
        await server.startup([listener])
        while Connections.num_made < NUM_CLIENTS:
            await asyncio.sleep(0)
            num_turns += 1
    await until(lambda: Connections.num_lost == NUM_CLIENTS)
    await server.shutdown([listener])
    return num_turns


def test_clients_that_come_together_are_accepted_together() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=2 * NUM_CLIENTS) as listener:
        assert uvloop.run(accept_all(listener)) < MOST_TURNS
    assert Connections.num_lost == NUM_CLIENTS
