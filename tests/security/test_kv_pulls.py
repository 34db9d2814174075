"""KV over TLS, between our own ends and grpcio's in every combination, and who may take it."""

from __future__ import annotations

import asyncio
import random
import socket
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial

import pytest

from edge.address import join_address
from edge.h2.out_message import OutMessage
from edge.h2.rpc_method import RpcMethod, ServerCall
from edge.h2.tls_socket import TlsSocket
from edge.security.config import PlaintextRefused, Role, SecurityConfig
from edge.security.credentials import Credentials
from kv_transfer.config import KVTransferConfig
from kv_transfer.errors import KVTransferError, PeerLost
from kv_transfer.transports.stream.ends import new_pull_server
from kv_transfer.transports.stream.grpcio.pull_client import GrpcPullClient
from kv_transfer.transports.stream.h2.pull_client import H2PullClient
from kv_transfer.wire.pull_client import HEAD_BYTES
from kv_transfer.wire.service_paths import PULL_PATH
from tandem_pb import kv_transfer_pb2 as pb
from tests.security.authority import Authority, move_service, tls_config
from tests.security.loopback import NEEDS_IPV6

SIZES = [64, 65, 20_000, 3 << 20, 16_384, 2 << 20, 100]
TRANSPORTS = {
    "h2": H2PullClient,
    "h2-threads": partial(H2PullClient, receive_threads=2),
    "grpcio": GrpcPullClient,
}


@cache
def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


class Service:
    """Gives messages of `SIZES`, in parts as blocks of a cache would be."""

    def methods(self):
        return {PULL_PATH: RpcMethod(self.pull, pb.PullRequest.FromString)}

    async def pull(self, request: pb.PullRequest, call: ServerCall) -> None:
        for size in SIZES:
            data = memoryview(content(size))
            blocks = [data[i : i + 70_001] for i in range(40, size, 70_001)]
            await call.write(OutMessage([data[:40], *blocks]))


@dataclass
class Sink:
    messages: list[bytes] = field(default_factory=list)
    _head: bytes = b""
    _rest: bytearray = field(default_factory=bytearray)

    def begin(self, head: bytes, num_bytes: int) -> list[memoryview]:
        self._head, self._rest = head, bytearray(num_bytes - min(num_bytes, HEAD_BYTES))
        view = memoryview(self._rest)
        return [view[i : i + 50_000] for i in range(0, len(view), 50_000)]

    def fill(self, part: memoryview) -> None:
        pass

    def end(self) -> None:
        self.messages.append(self._head + bytes(self._rest))


@asynccontextmanager
async def producer(credentials: Credentials, kind: str = "h2", host: str = "127.0.0.1"):
    config = KVTransferConfig(kv_role="kv_producer", pull_transport=kind)
    server = new_pull_server(config, Service().methods(), credentials)
    try:
        yield join_address(host, await server.listen(host, 0))
    finally:
        await server.close()


async def pull(address: str, credentials: Credentials, kind: str = "h2") -> None:
    """Pulls KV. Raises `KVTransferError`."""
    transport, sink = TRANSPORTS[kind](credentials), Sink()
    try:
        async with asyncio.timeout(30):
            await transport.pull(address, 0, pb.PullRequest(), sink)
    finally:
        await transport.close()
    assert sink.messages == [content(size) for size in SIZES]


@pytest.mark.parametrize("puller", TRANSPORTS)
@pytest.mark.parametrize("server", TRANSPORTS)
async def test_kv_arrives_whole_over_tls(authority: Authority, server, puller):
    async with producer(authority.credentials(Role.PREFILL), server) as address:
        await pull(address, authority.credentials(Role.DECODE), puller)


@NEEDS_IPV6
async def test_kv_over_ipv6(authority: Authority):
    async with producer(authority.credentials(Role.PREFILL), host="::1") as address:
        await pull(address, authority.credentials(Role.DECODE))


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_only_decode_nodes_take_kv(authority: Authority, foreign: Authority, kind):
    async with producer(authority.credentials(Role.PREFILL), kind) as address:
        with pytest.raises(PeerLost, match="tandem-decode only"):
            await pull(address, authority.credentials(Role.ROUTER), kind)
        for stranger in (foreign.credentials(Role.DECODE), Credentials()):
            with pytest.raises(KVTransferError):
                await pull(address, stranger, kind)
        await pull(address, authority.credentials(Role.DECODE), kind)


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_kv_comes_from_prefill_nodes_only(authority: Authority, kind):
    decode = authority.credentials(Role.DECODE, "role")
    folder = authority.service("somewhere", Role.ROUTER, ("127.0.0.1",))
    async with producer(Credentials(tls_config(folder, "role")), kind) as address:
        with pytest.raises(PeerLost):
            await pull(address, decode, kind)


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_the_token_is_demanded(token_file, kind):
    knows = Credentials(SecurityConfig(cluster_token_file=str(token_file("a" * 32))))
    async with producer(knows, kind) as address:
        await pull(address, knows, kind)
        with pytest.raises(PeerLost, match="UNAUTHENTICATED: the cluster token"):
            await pull(address, Credentials(), kind)


async def test_renewed_certificates_are_used_without_a_restart(authority, foreign):
    node_folder, decode_folder = authority.service("n"), authority.service("d")
    decode, outdated = Credentials(tls_config(decode_folder)), authority.credentials()
    async with producer(Credentials(tls_config(node_folder))) as address:
        await pull(address, decode)
        move_service(foreign.service("n"), node_folder)
        move_service(foreign.service("d"), decode_folder)
        await pull(address, decode)
        with pytest.raises(PeerLost):
            await pull(address, outdated)


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_nothing_is_pulled_or_exported_beyond_this_host_in_plaintext(kind):
    with pytest.raises(PeerLost, match="--allow-plaintext"):
        await pull("192.0.2.1:5000", Credentials(), kind)
    with pytest.raises(PlaintextRefused, match="--allow-plaintext"):
        async with producer(Credentials(), kind, "0.0.0.0"):
            pass


async def test_a_peer_that_reads_slowly_gets_every_byte(authority: Authority):
    """Records that the kernel has no room for are finished later, whatever comes next."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    for end in (ours, theirs):
        end.setblocking(False)
    credentials = authority.credentials()
    sender, reader = await asyncio.gather(
        TlsSocket.accept(ours, credentials.server_tls("kv", h2=True).context),
        TlsSocket.connect(theirs, credentials.client_context("127.0.0.1:1", h2=True), "127.0.0.1"),
    )
    draw = random.Random(0)
    parts = [draw.randbytes(draw.choice([1, 9, 5000, 70_000, 200_000])) for _ in range(60)]
    wanted, received, sent = b"".join(parts), bytearray(), 0
    while len(received) < len(wanted):
        with suppress(BlockingIOError):
            cut = draw.randrange(1, 90_000)
            rest = memoryview(wanted)[sent:]
            sent += (
                sender.sendmsg([rest[i : i + cut] for i in range(0, len(rest), cut)]) if rest else 0
            )
        with suppress(BlockingIOError):
            received += reader.recv(draw.randrange(1, 40_000))
    assert received == wanted
    sender.close()
    reader.close()
