"""Only those who may get through to a gRPC server of ours, on a real connection."""

from __future__ import annotations

from contextlib import asynccontextmanager

import grpc
import pytest

from edge.address import join_address
from edge.security.call_guard import OPEN_SERVICES, CallGuard
from edge.security.config import Role, SecurityConfig
from edge.security.credentials import Credentials
from edge.security.renewed_channel import RenewedChannel
from tests.security.authority import Authority, move_service, tls_config
from tests.security.loopback import LOOPBACK_HOSTS

SECRET = "a" * 32
[OPEN] = OPEN_SERVICES
SERVICES = ("guarded", OPEN, "forgotten")
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]


async def _echo(request, context):
    return request


async def _write_twice(request, context):
    await context.write(request)
    await context.write(request)


async def _yield_twice(request, context):
    yield request
    yield request


@asynccontextmanager
async def server_of(credentials: Credentials, host: str = "127.0.0.1"):
    """Returns its address. It lets decode nodes call `guarded`, everybody `OPEN`, nobody
    `forgotten`.
    """
    server = grpc.aio.server(interceptors=[CallGuard(credentials, {"guarded": {Role.DECODE}})])
    methods = {
        "Echo": grpc.unary_unary_rpc_method_handler(_echo),
        "Writes": grpc.unary_stream_rpc_method_handler(_write_twice),
        "Yields": grpc.unary_stream_rpc_method_handler(_yield_twice),
    }
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(name, methods) for name in SERVICES)
    )
    port = credentials.add_port(server, host, 0)
    await server.start()
    try:
        yield join_address(host, port)
    finally:
        await server.stop(None)


async def call(channel: grpc.aio.Channel, credentials: Credentials, service="guarded") -> bytes:
    method = channel.unary_unary(f"/{service}/Echo")
    return await method(b"hello", metadata=credentials.metadata(), timeout=60)


async def outcome(address: str, credentials: Credentials, service="guarded"):
    """OK, or the status of the refusal."""
    async with credentials.channel(address, Role.PREFILL, OPTIONS) as channel:
        try:
            assert await call(channel, credentials, service) == b"hello"
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


OK = grpc.StatusCode.OK
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
DENIED = grpc.StatusCode.PERMISSION_DENIED
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("host", LOOPBACK_HOSTS)
async def test_mutual_tls_lets_the_right_peer_in(authority: Authority, host):
    async with server_of(authority.credentials(Role.PREFILL), host) as address:
        assert await outcome(address, authority.credentials(Role.DECODE)) is OK
        assert await outcome(address, authority.credentials()) is OK
        assert await outcome(address, authority.credentials(), "forgotten") is DENIED
        assert await outcome(address, authority.credentials(Role.DECODE), "forgotten") is DENIED


async def test_a_stream_is_guarded_too(authority: Authority):
    decode, router = authority.credentials(Role.DECODE), authority.credentials(Role.ROUTER)
    async with server_of(authority.credentials(Role.PREFILL)) as address:
        for method in ("Writes", "Yields"):
            async with decode.channel(address, Role.PREFILL, OPTIONS) as channel:
                stream = channel.unary_stream(f"/guarded/{method}")(b"x")
                assert [message async for message in stream] == [b"x", b"x"]
            async with router.channel(address, Role.PREFILL, OPTIONS) as channel:
                with pytest.raises(grpc.aio.AioRpcError, match="tandem-decode only"):
                    async for _ in channel.unary_stream(f"/guarded/{method}")(b"x"):
                        pass


async def test_strangers_are_refused(authority: Authority, foreign: Authority):
    async with server_of(authority.credentials(Role.PREFILL)) as address:
        assert await outcome(address, Credentials()) is UNAVAILABLE
        assert await outcome(address, foreign.credentials(Role.DECODE)) is UNAVAILABLE
        assert await outcome(address, authority.credentials(Role.ROUTER)) is DENIED
        assert await outcome(address, authority.credentials(Role.ROUTER), OPEN) is OK
        without = grpc.ssl_channel_credentials(
            (authority.service("ca-only") / "ca.crt").read_bytes()
        )
        async with grpc.aio.secure_channel(address, without) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(channel, Credentials(), OPEN)
            assert refused.value.code() is UNAVAILABLE


async def test_a_server_must_be_who_was_dialled(authority: Authority, foreign: Authority):
    decode = authority.credentials(Role.DECODE)
    async with server_of(foreign.credentials(Role.PREFILL)) as address:
        assert await outcome(address, decode) is UNAVAILABLE
    elsewhere = authority.service("elsewhere", Role.PREFILL, ("10.9.9.9",))
    async with server_of(Credentials(tls_config(elsewhere))) as address:
        assert await outcome(address, decode) is UNAVAILABLE


async def test_by_role_the_address_does_not_matter_and_the_role_does(authority: Authority):
    decode = authority.credentials(Role.DECODE, "role")
    for role, expected in ((Role.PREFILL, OK), (Role.ROUTER, UNAVAILABLE)):
        folder = authority.service("somewhere", role, ("10.9.9.9",))
        async with server_of(Credentials(tls_config(folder, "role"))) as address:
            assert await outcome(address, decode) is expected


async def test_the_token_is_demanded(token_file):
    with_token = Credentials(SecurityConfig(cluster_token_file=str(token_file(SECRET))))
    async with server_of(with_token) as address:
        assert await outcome(address, with_token) is OK
        assert await outcome(address, Credentials()) is UNAUTHENTICATED
        assert await outcome(address, Credentials(), OPEN) is OK


async def test_renewed_certificates_are_used_without_a_restart(authority, foreign):
    """The whole authority changes; who still shows the old one is refused."""
    server_folder, client_folder = authority.service("s"), authority.service("c")
    client, outdated = Credentials(tls_config(client_folder)), authority.credentials()
    async with server_of(Credentials(tls_config(server_folder))) as address:
        channel = RenewedChannel(
            lambda: client.channel(address, Role.PREFILL, OPTIONS), address, client
        )
        first = await channel.get()
        assert await call(first, client) == b"hello"
        move_service(foreign.service("s"), server_folder)
        move_service(foreign.service("c"), client_folder)
        assert await channel.get() is not first
        assert await call(await channel.get(), client) == b"hello"
        assert await call(first, client) == b"hello"
        assert await outcome(address, outdated) is UNAVAILABLE
        await channel.close()
