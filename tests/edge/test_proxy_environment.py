"""A proxy in the environment is for what is outside: calls between nodes never take it."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from edge.security.config import Role, SecurityConfig
from edge.security.credentials import Credentials

NOBODY = "http://127.0.0.1:9"


async def _echo(request: bytes, context: object) -> bytes:
    return request


@pytest.mark.parametrize("name", ["grpc_proxy", "https_proxy", "http_proxy"])
async def test_a_node_is_called_without_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, NOBODY)
    server = grpc.aio.server()
    echo = grpc.unary_unary_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {"Echo": echo}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    credentials = Credentials(SecurityConfig())
    try:
        async with credentials.channel(f"127.0.0.1:{port}", Role.PREFILL, ()) as channel:
            answer: object = await channel.unary_unary("/t/Echo")(b"here", timeout=60)
        assert answer == b"here"
    finally:
        await server.stop(None)
