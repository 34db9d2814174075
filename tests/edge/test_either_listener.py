"""A listener without descriptors for new connections leaves the processor to those that it has."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from edge import acceptor
from edge.http.connection.http_listener import EitherListener
from edge.security.server_tls import ServerTls
from tests.edge.full_listener import FullListener

TIMEOUT_S = 30.0


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(b"hello")
        self._transport.close()


async def test_whoever_cannot_be_accepted_is_left_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptor, "_PAUSE_S", 0.2)
    with FullListener() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        tls = ServerTls(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), lambda: None)
        either = EitherListener(listener, tls, Greeter, TIMEOUT_S)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"x")
        async with asyncio.timeout(TIMEOUT_S):
            while not listener.num_refused:
                await asyncio.sleep(0)
            for _ in range(50):
                await asyncio.sleep(0)
            assert listener.num_refused == 1
            listener.is_full = False
            assert await reader.read() == b"hello"
        writer.close()
        either.close()
        await either.wait_closed()
