"""TLS is turned on in a running cluster: no call between old and new services fails, nobody falls
back to plaintext without need, and once it is on nobody does at all."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Callable

import aiohttp
import grpc
import pytest

from cli.local_cluster.cluster import free_ports
from decode_node.http.callers import Caller, CallerCheck, CallerKeys
from edge.address import join_address
from edge.http.errors import Unauthorized
from edge.http.request_head import RequestHead
from edge.security import peer_tls
from edge.security.cluster_token import TOKEN_HEADER
from edge.security.config import Role, SecurityConfig, SecurityError
from edge.security.credentials import CallerRefused, Credentials
from edge.security.peer_tls import PeerTls
from edge.security.renewed_channel import RenewedChannel
from kv_transfer.errors import KVTransferError
from router.config import RouterSettings
from tests.router.cluster import run_router
from tests.security.authority import Authority, tls_config
from tests.security.test_grpc_calls import OPTIONS, call
from tests.security.test_http_calls import KEY, ask, decode_api
from tests.security.test_kv_pulls import producer, pull
from tests.security.test_node_services import MISFIT, OK, outcomes, prefill_node

PLAIN, EITHER, TLS = range(3)
"""Steps of a roll, as releases of one service."""

Stages = Callable[[Role, int], Credentials]


@pytest.fixture
def stages(authority: Authority) -> Stages:
    def of(role: Role, step: int) -> Credentials:
        if step == PLAIN:
            return Credentials()
        config = tls_config(authority.service(f"of-{role}", role), "role")
        return Credentials(dataclasses.replace(config, accept_missing_tls=step == EITHER))

    return of


def count(credentials: Credentials) -> int:
    return credentials.plaintext_connections.total()


NEIGHBOURS = [(PLAIN, EITHER), (EITHER, PLAIN), (EITHER, EITHER), (EITHER, TLS), (TLS, EITHER)]


@pytest.mark.parametrize(("served", "dialled"), NEIGHBOURS)
async def test_neighbours_of_a_roll_serve_each_other(
    stages: Stages, served: int, dialled: int
) -> None:
    """Plaintext is used only where one of the two knows nothing else, and then it is counted."""
    node, router, decode = (
        stages(Role.PREFILL, served),
        *(stages(role, dialled) for role in (Role.ROUTER, Role.DECODE)),
    )
    async with prefill_node(node) as address:
        assert (await outcomes(address, router))[0] is OK
        assert (await outcomes(address, decode))[1] is MISFIT
    grpc_count = count(node)
    async with producer(node) as address:
        await pull(address, decode)
    kv_count = count(node) - grpc_count
    api = stages(Role.DECODE, served)
    async with decode_api(api) as address:
        assert await ask(address, router) == (200, b'{"caller":"trusted"}')
    is_counted = (served, dialled) == (EITHER, PLAIN)
    assert [bool(found) for found in (grpc_count, kv_count, count(api))] == [is_counted] * 3


@pytest.mark.parametrize(("served", "dialled"), [(TLS, PLAIN), (PLAIN, TLS)])
async def test_all_at_once_is_an_outage(stages: Stages, served: int, dialled: int) -> None:
    """And so nobody who does not accept plaintext can be talked into it."""
    router, decode = stages(Role.ROUTER, dialled), stages(Role.DECODE, dialled)
    async with prefill_node(stages(Role.PREFILL, served)) as address:
        assert (await outcomes(address, router))[0] is grpc.StatusCode.UNAVAILABLE
    async with producer(stages(Role.PREFILL, served)) as address:
        with pytest.raises(KVTransferError):
            await pull(address, decode)
    async with decode_api(stages(Role.DECODE, served)) as address:
        assert (await ask(address, router))[0] == 0


async def test_who_speaks_tls_must_be_the_right_one_in_between(
    stages: Stages, foreign: Authority
) -> None:
    node = stages(Role.DECODE, EITHER)
    async with decode_api(node) as address:
        assert (await ask(address, stages(Role.PREFILL, TLS)))[0] == 403
        assert (await ask(address, foreign.credentials(Role.ROUTER)))[0] == 0
        async with aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.ClientError):
                async with client.get(f"https://{address}/who", ssl=False) as answer:
                    await answer.read()
    assert count(node) == 0


async def test_a_channel_goes_over_to_tls_with_its_peer(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_tls, "_FRESH_S", 0.0)
    decode, [port] = stages(Role.DECODE, EITHER), free_ports(1)
    async with prefill_node(stages(Role.PREFILL, PLAIN), port=port) as address:
        channel = RenewedChannel(
            lambda: decode.channel(address, Role.PREFILL, OPTIONS), address, decode
        )
        first = await channel.get()
        assert await channel.get() is first
        path = "grpc.health.v1.Health"
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await call(first, decode, path)
    upgraded = stages(Role.PREFILL, EITHER)
    async with prefill_node(upgraded, port=port):
        second = await channel.get()
        assert second is not first
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await call(second, decode, path)
        await channel.close()
    assert count(upgraded) == 0


async def test_a_peer_that_does_not_answer_is_dialled_by_tls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever was known of it before."""
    monkeypatch.setattr(peer_tls, "_FRESH_S", 0.0)
    monkeypatch.setattr(peer_tls, "_ANSWER_S", 30.0)
    peers = PeerTls()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    [port] = free_ports(1)
    server = await asyncio.start_server(greet, "127.0.0.1", port)
    address = join_address("127.0.0.1", port)
    await peers.ask(address)
    assert peers.speaks_plaintext(address)
    server.close()
    await server.wait_closed()
    await peers.ask(address)
    assert not peers.speaks_plaintext(address), "refused"
    monkeypatch.setattr(peer_tls, "_ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", port)):
        await peers.ask(address)
    assert not peers.speaks_plaintext(address), "silent"


async def test_a_peer_that_hangs_up_on_a_handshake_has_not_shown_plaintext() -> None:
    """Else a TLS server that is full would be dialled without."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        address = join_address(*server.sockets[0].getsockname()[:2])
        peers = PeerTls()
        await peers.ask(address)
        assert not peers.speaks_plaintext(address)


async def test_peers_are_asked_once_by_all_who_want_to_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    async def first_byte(address: str) -> bytes:
        asked.append(address)
        await asyncio.sleep(0)
        return b"H"

    monkeypatch.setattr(peer_tls, "_FRESH_S", 3600.0)
    monkeypatch.setattr(peer_tls, "_first_byte", first_byte)
    monkeypatch.setattr(peer_tls, "_MAX_KNOWN", 3)
    peers = PeerTls()
    await asyncio.gather(*(peers.ask("a:1") for _ in range(20)))
    assert asked == ["a:1"]
    for number in range(3):
        await peers.ask(f"b:{number}")
    assert (peers.speaks_plaintext("a:1"), peers.speaks_plaintext("b:2")) == (False, True)


def test_without_tls_a_caller_shows_what_there_is_besides(
    authority: Authority, token_file: Callable[[str], object]
) -> None:
    """The token, and a client its key: only the certificate may be missing, and only there."""
    config = tls_config(authority.service("n", Role.DECODE), "role")
    either = dataclasses.replace(config, accept_missing_tls=True)
    credentials = Credentials(
        dataclasses.replace(either, cluster_token_file=str(token_file("t" * 32)))
    )
    allowed, token = {Role.ROUTER}, {TOKEN_HEADER: "t" * 32}
    credentials.check_caller(allowed, None, token, is_plaintext=True)
    for headers, is_plaintext in (({}, True), ({TOKEN_HEADER: "no"}, True), (token, False)):
        with pytest.raises(CallerRefused):
            credentials.check_caller(allowed, None, headers, is_plaintext=is_plaintext)
    with pytest.raises(CallerRefused):
        Credentials(config).check_caller(allowed, None, {}, is_plaintext=True)

    keys = CallerCheck(CallerKeys(["the-key"]), Credentials(either))
    with pytest.raises(Unauthorized):
        keys.admit(RequestHead(path="/v1/models", headers={}, is_plaintext=True))
    assert (
        keys.admit(RequestHead(path="/v1/models", headers=KEY, is_plaintext=True)) is Caller.TRUSTED
    ), "as before"
    assert (
        keys.admit(RequestHead(path="/v1/models", headers=KEY, is_plaintext=False))
        is Caller.API_CLIENT
    )


async def test_clients_of_a_router_learn_https_in_their_own_time(authority: Authority) -> None:
    folder = authority.service("router", Role.ROUTER)
    files = {
        f"{kind}_{file}_file": folder / f"tls.{end}"
        for kind in ("tls", "https")
        for file, end in (("cert", "crt"), ("key", "key"))
    }
    settings = RouterSettings(
        port=0, **files, tls_ca_file=folder / "ca.crt", accept_missing_tls=True
    )
    async with run_router(settings) as router:
        for scheme in ("http", "https", "http"):
            url = router.url.replace("http", scheme, 1)
            async with router.client.get(f"{url}/health", ssl=False) as answer:
                assert answer.status == 200
        name = "tandem_plaintext_connections_total"
        assert router.metric(name, port="https") == 1, "the second one has used the first's"


def test_without_tls_the_setting_means_nothing() -> None:
    with pytest.raises(SecurityError, match="--tls-cert-file"):
        Credentials(SecurityConfig(accept_missing_tls=True))


async def test_grpcio_cannot_serve_both(authority: Authority) -> None:
    config = dataclasses.replace(tls_config(authority.service("n")), accept_missing_tls=True)
    with pytest.raises(SecurityError, match="h2"):
        async with producer(Credentials(config), "grpcio"):
            pass
