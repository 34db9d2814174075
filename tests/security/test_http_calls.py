"""Only those who may get through to a decode node's API, and the router's way there, on real
connections."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from decode_node.http.callers import CallerCheck, CallerKeys
from decode_node.http.middleware import EdgeMiddleware
from edge.address import join_address
from edge.http.connection.guarded_protocol import (
    ConnectionLimits,
    GuardedProtocol,
    guarded_protocol,
)
from edge.http.outer_edge import OuterEdge
from edge.http.tls_http import TlsConfig
from edge.security.config import Role, SecurityConfig
from edge.security.credentials import Credentials
from engine.node.http_server import HttpServer, listen
from engine.node.open_requests import OpenRequests
from router.config import RouterSettings
from router.errors import NodeLost, NodeUnreachable
from router.nodes.http.transport import HttpTransport
from tests.router.cluster import run_router
from tests.security.authority import Authority, move_service, tls_config
from tests.security.loopback import LOOPBACK_HOSTS

SECRET = "a" * 32
KEY = {"authorization": "Bearer the-key"}


async def _who(scope: Scope, receive: Receive, send: Send) -> None:
    caller = scope["state"].get("caller")
    await JSONResponse({"caller": caller and caller.value})(scope, receive, send)


@asynccontextmanager
async def decode_api(
    credentials: Credentials, *keys: str, host: str = "127.0.0.1", **options: float
):
    """Returns its address. It says whom it takes the caller for."""
    callers = CallerCheck(CallerKeys(keys), credentials)
    tls = credentials.server_tls("http", demands_certificate=not callers.has_keys)
    listener = listen(host, 0)
    app = OuterEdge(EdgeMiddleware(_who, callers, OpenRequests()), lambda: False)
    protocol = guarded_protocol(ConnectionLimits(), callers)
    server = HttpServer(
        TlsConfig(app, tls, http=protocol, lifespan="off", log_config=None, ws="none", **options)
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield join_address(host, listener.getsockname()[1])
    finally:
        server.should_exit = True
        await serving


async def ask(address: str, credentials: Credentials, headers=None) -> tuple[int, bytes]:
    """As the router asks: status and body. A connection that is refused is status 0."""
    transport = HttpTransport(5, 5, 0.001, credentials)
    await transport.open()
    try:
        response = await transport.request("GET", f"http://{address}/who", headers or {})
        body = b""
        while chunk := await response.read_chunk():
            body += chunk
        return response.status, body
    except (NodeUnreachable, NodeLost):
        return 0, b""
    finally:
        await transport.close()


@pytest.mark.parametrize("host", LOOPBACK_HOSTS)
async def test_a_router_is_known_by_its_certificate(authority: Authority, host):
    async with decode_api(authority.credentials(Role.DECODE), host=host) as address:
        status, body = await ask(address, authority.credentials(Role.ROUTER))
        assert (status, body) == (200, b'{"caller":"trusted"}')


async def test_strangers_are_refused(authority: Authority, foreign: Authority):
    async with decode_api(authority.credentials(Role.DECODE)) as address:
        status, body = await ask(address, authority.credentials(Role.PREFILL))
        assert status == 403
        assert b"tandem-router only" in body
        assert (await ask(address, foreign.credentials(Role.ROUTER)))[0] == 0
        assert (await ask(address, Credentials()))[0] == 0
        without = ssl.create_default_context(cafile=authority.service("ca") / "ca.crt")
        async with aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.ClientError):
                async with client.get(f"https://{address}/who", ssl=without) as answer:
                    await answer.read()


async def test_a_server_must_be_a_decode_node(authority: Authority):
    router = authority.credentials(Role.ROUTER, "role")
    for role, expected in ((Role.DECODE, 200), (Role.PREFILL, 0)):
        folder = authority.service("somewhere", role, ("10.9.9.9",))
        async with decode_api(Credentials(tls_config(folder, "role"))) as address:
            assert (await ask(address, router))[0] == expected


async def test_a_client_with_a_key_needs_no_certificate_and_is_no_router(authority: Authority):
    async with decode_api(authority.credentials(Role.DECODE), "the-key") as address:
        trust = ssl.create_default_context(cafile=authority.service("ca") / "ca.crt")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as client:
            async with client.get(f"https://{address}/who", headers=KEY) as answer:
                assert await answer.json() == {"caller": "api client"}
            async with client.get(f"https://{address}/who") as answer:
                assert answer.status == 401
            async with client.get(f"https://{address}/health") as answer:
                assert answer.status == 200


async def test_a_server_ends_beside_a_connection_that_is_closing(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
):
    """A client that was idle for too long has not taken note yet when the server ends."""
    trust = ssl.create_default_context(cafile=authority.service("ca") / "ca.crt")
    was_shut = threading.Event()
    shutdown = GuardedProtocol.shutdown

    def shut(protocol: GuardedProtocol) -> None:
        shutdown(protocol)
        was_shut.set()

    monkeypatch.setattr(GuardedProtocol, "shutdown", shut)

    def stay(address: str, is_closing: Callable[[], object]) -> None:
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as plain:
            client = trust.wrap_socket(plain, server_hostname=host)
            client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            while client.recv(4096):  # The end is not answered yet.
                pass
            is_closing()
            assert was_shut.wait(30)
            client.close()

    async with decode_api(authority.credentials(Role.DECODE), "k", timeout_keep_alive=1) as address:
        is_closing, loop = asyncio.Event(), asyncio.get_running_loop()
        staying = asyncio.create_task(
            asyncio.to_thread(stay, address, lambda: loop.call_soon_threadsafe(is_closing.set))
        )
        await is_closing.wait()
    await staying


async def test_the_token_makes_a_router(token_file):
    knows = Credentials(SecurityConfig(cluster_token_file=str(token_file(SECRET))))
    async with decode_api(knows) as address:
        assert await ask(address, knows) == (200, b'{"caller":"trusted"}')
        status, body = await ask(address, Credentials())
        assert status == 401
        assert b"cluster token" in body
    async with decode_api(knows, "the-key") as address:
        assert await ask(address, Credentials(), KEY) == (200, b'{"caller":"api client"}')
        assert (await ask(address, Credentials()))[0] == 401


async def test_a_handshake_that_never_comes_is_not_waited_for(authority: Authority):
    credentials = authority.credentials(Role.DECODE)
    async with decode_api(credentials, handshake_timeout_s=0.2) as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()
        router = authority.credentials(Role.ROUTER)
        async with asyncio.timeout(30):
            while (await ask(address, router))[0] != 200:
                """Ours may have been too slow as well."""


async def test_renewed_certificates_are_used_without_a_restart(authority, foreign):
    """Even those of another authority, on a listener that was opened before."""
    node_folder, router_folder = authority.service("n"), authority.service("r")
    router, outdated = Credentials(tls_config(router_folder)), authority.credentials()
    async with decode_api(Credentials(tls_config(node_folder))) as address:
        assert (await ask(address, router))[0] == 200
        move_service(foreign.service("n"), node_folder)
        move_service(foreign.service("r"), router_folder)
        assert (await ask(address, router))[0] == 200
        assert (await ask(address, outdated))[0] == 0


async def test_the_router_does_not_dial_in_plaintext_beyond_this_host():
    transport = HttpTransport(1, 1, 1, Credentials())
    await transport.open()
    with pytest.raises(NodeUnreachable, match="--allow-plaintext"):
        await transport.request("GET", "http://192.0.2.1:80/", {})
    await transport.close()


async def test_the_router_speaks_https_to_clients(authority: Authority):
    folder = authority.service("public")
    settings = RouterSettings(
        port=0, https_cert_file=folder / "tls.crt", https_key_file=folder / "tls.key"
    )
    trust = ssl.create_default_context(cafile=folder / "ca.crt")
    async with run_router(settings) as router:
        url = router.url.replace("http://", "https://")
        async with router.client.get(f"{url}/health", ssl=trust) as answer:
            assert answer.status == 200
        reader, writer = await asyncio.open_connection(
            *url.removeprefix("https://").split(":"), ssl=trust
        )
        writer.write(b"not http\r\n\r\n")
        assert b"invalid_request_error" in await reader.read()
        writer.close()
