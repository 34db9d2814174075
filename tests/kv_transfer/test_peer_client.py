"""Short calls to a process that was away for a moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from kv_caches import layout

from kv_transfer.channels import CONTROL
from kv_transfer.errors import PeerLost
from kv_transfer.metadata import KVPeer, RecvMeta, ReleaseMeta
from kv_transfer.peer_client import PeerClient
from kv_transfer.pull_service import SERVICE
from tandem_pb import kv_transfer_pb2 as pb
from tandem_wire.credentials import Credentials
from tandem_wire.security_config import SecurityConfig

PEER = KVPeer(engine_id="prefill", epoch=7, layout=layout())
META = RecvMeta("a" * 32, 0, PEER, [0], 0, 16)


@pytest_asyncio.fixture
async def client() -> AsyncIterator[PeerClient]:
    client = PeerClient(PEER, 5.0, Credentials(SecurityConfig()))
    yield client
    await client.close()


async def start_server(port: int, known: bool) -> tuple[grpc.aio.Server, int]:
    """Answers `StillHeld`."""

    async def still_held(request: pb.ReleaseRequest, context: object) -> pb.ReleaseReply:
        return pb.ReleaseReply(known=known)

    handler = grpc.unary_unary_rpc_method_handler(
        still_held,
        request_deserializer=pb.ReleaseRequest.FromString,
        response_serializer=pb.ReleaseReply.SerializeToString,
    )
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"StillHeld": handler}),)
    )
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, port


async def fail_once(client: PeerClient, address: str) -> asyncio.Task[None]:
    """As after a transfer whose holder died: the release waits, its channel has a backoff."""
    release = asyncio.create_task(client.release(address, ReleaseMeta("b" * 32, 0, PEER, False)))
    channel = client._channels.get(address, CONTROL)
    async with asyncio.timeout(30):
        while (state := channel.get_state()) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            await channel.wait_for_state_change(state)
    return release


async def test_a_peer_that_is_back_is_asked_and_not_its_backoff(client: PeerClient) -> None:
    server, port = await start_server(0, known=True)
    await server.stop(None)
    address = f"127.0.0.1:{port}"
    release = await fail_once(client, address)
    server, _ = await start_server(port, known=True)
    try:
        await client.check_still_held(address, META)
    finally:
        release.cancel()
        await server.stop(None)


async def test_a_peer_that_is_away_is_lost(client: PeerClient) -> None:
    server, port = await start_server(0, known=True)
    await server.stop(None)
    with pytest.raises(PeerLost, match="UNAVAILABLE"):
        await client.check_still_held(f"127.0.0.1:{port}", META)


async def test_a_peer_that_has_let_go_is_lost(client: PeerClient) -> None:
    server, port = await start_server(0, known=False)
    try:
        with pytest.raises(PeerLost, match="let go"):
            await client.check_still_held(f"127.0.0.1:{port}", META)
    finally:
        await server.stop(None)
