"""Short calls to a process that was away for a moment, or is none of ours."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from kv_caches import layout

from edge.security.config import SecurityConfig
from edge.security.credentials import Credentials
from kv_transfer.consumer.peer_client import PeerClient
from kv_transfer.errors import PeerLost
from kv_transfer.metadata import KVPeer, ReleaseMeta
from kv_transfer.wire.channels import CONTROL
from kv_transfer.wire.service_paths import SERVICE
from tandem_pb import kv_transfer_pb2 as pb
from tests.awaited import until
from tests.garbled_server import garbled_server, only_warning
from tests.router.fault_proxy import FaultProxy

PEER = KVPeer(engine_id="prefill", epoch=7, layout=layout())


async def start_server(
    port: int, released: list[str], may_answer: asyncio.Event | None = None
) -> tuple[grpc.aio.Server, int]:
    """Answers `Release`."""

    async def release(request: pb.ReleaseRequest, context: object) -> pb.ReleaseReply:
        released.append(request.transfer_id)
        if may_answer is not None:
            await may_answer.wait()
        return pb.ReleaseReply(known=True)

    handler = grpc.unary_unary_rpc_method_handler(
        release,
        request_deserializer=pb.ReleaseRequest.FromString,
        response_serializer=pb.ReleaseReply.SerializeToString,
    )
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Release": handler}),)
    )
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, port


async def test_a_release_waits_for_a_peer_that_starts_again() -> None:
    """Its channel has a backoff, from which calls would be refused meanwhile."""
    client = PeerClient(PEER, 5.0, Credentials(SecurityConfig()))
    released: list[str] = []
    server, port = await start_server(0, released)
    await server.stop(None)
    address = f"127.0.0.1:{port}"
    release = asyncio.create_task(client.release(address, ReleaseMeta("b" * 32, 0, PEER, False)))
    try:
        channel = await client._channels.get(address, CONTROL)
        async with asyncio.timeout(30):
            while (state := channel.get_state()) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await channel.wait_for_state_change(state)
        assert not release.done()
        server, _ = await start_server(port, released)
        await release
        assert released == ["b" * 32]
    finally:
        release.cancel()
        await server.stop(None)
        await client.close()


async def test_a_release_whose_connection_breaks_is_made_once_more() -> None:
    """The peer would keep the blocks for its lease."""
    client = PeerClient(PEER, 5.0, Credentials(SecurityConfig()))
    released: list[str] = []
    may_answer = asyncio.Event()
    server, port = await start_server(0, released, may_answer)
    async with FaultProxy(port) as proxy:
        meta = ReleaseMeta("b" * 32, 0, PEER, True)
        release = asyncio.create_task(client.release(f"127.0.0.1:{proxy.port}", meta))
        await until(lambda: len(released) == 1)
        await proxy.drop()
        may_answer.set()
        await release
    assert released == ["b" * 32] * 2
    await client.close()
    await server.stop(None)


async def test_bytes_that_are_no_message_are_a_lost_peer(caplog: pytest.LogCaptureFixture) -> None:
    client = PeerClient(PEER, 5.0, Credentials(SecurityConfig()))
    async with garbled_server() as address:
        with pytest.raises(PeerLost, match=f"{address}: .*no message; see that"):
            await client.handshake(PEER, address)
        assert not client.knows(PEER, address)
        assert f"{address}: it answered with bytes that are no message" in only_warning(caplog)
        await client.release(address, ReleaseMeta("b" * 32, 0, PEER, False))
        assert "left to its lease: it answered with bytes" in only_warning(caplog)
        await client.close()
