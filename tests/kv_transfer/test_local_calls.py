"""Calls between transfer processes of one host that need no network: what they carry, who may make
them, what junk does, and what happens where they cannot be made."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import AsyncMock, create_autospec

import grpc
import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_loopback import all_tasks_are_held_up, until

from edge.h2.out_message import OutMessage
from edge.h2.rpc_method import RpcMethod, ServerCall
from kv_transfer.errors import CorruptChunk, NotServed, PeerLost
from kv_transfer.transports.cuda_ipc import local_pull_server
from kv_transfer.transports.cuda_ipc.local_frames import (
    HEAD,
    KEY_BYTES,
    FrameError,
    FrameReader,
    LocalAddress,
    LocalFrame,
    frame,
)
from kv_transfer.transports.cuda_ipc.local_pull_client import LocalPullClient
from kv_transfer.transports.cuda_ipc.local_pull_server import LocalPullServer
from kv_transfer.wire.pull_client import PullClient
from tandem_pb import kv_transfer_pb2 as pb

REQUEST = pb.PullRequest(transfer_id="ab" * 16, num_tokens=7)


class Sink:
    """Keeps the messages that came; raises for one that is longer than `most_bytes`."""

    def __init__(self, most_bytes: int = 1 << 30) -> None:
        self.messages: list[bytes] = []
        self._most_bytes = most_bytes
        self._memory = bytearray()

    def begin(self, head: bytes, num_bytes: int) -> list[memoryview]:
        if num_bytes > self._most_bytes:
            raise CorruptChunk("too long")
        self._memory = bytearray(num_bytes)
        self._memory[: len(head)] = head
        return [memoryview(self._memory)[len(head) :]] if num_bytes > len(head) else []

    def fill(self, part: memoryview) -> None:
        return

    def end(self) -> None:
        self.messages.append(bytes(self._memory))


class Service:
    """Answers with `messages`, then as `ending` says."""

    def __init__(self, messages: list[bytes] | None = None, ending: str = "ok") -> None:
        self.messages = messages if messages is not None else [b"one", b"two" * 100]
        self.ending = ending
        self.requests: list[pb.PullRequest] = []
        self.num_open = 0
        self.num_sent = 0
        self.num_dropped = 0

    async def pull(self, request: pb.PullRequest, call: ServerCall) -> None:
        self.requests.append(request)
        self.num_open += 1
        try:
            for message in self.messages:
                await call.write(OutMessage([message], self._on_end))
            if self.ending == "never":
                await asyncio.Event().wait()
            if self.ending == "error":
                raise ValueError("a fault of ours")
            if self.ending == "not served":
                await call.abort(grpc.StatusCode.UNIMPLEMENTED, "not that way")
        finally:
            self.num_open -= 1

    def _on_end(self, is_sent: bool) -> None:
        self.num_sent += is_sent
        self.num_dropped += not is_sent


@asynccontextmanager
async def serving(service: Service, **patience: float) -> AsyncIterator[LocalPullServer]:
    method = RpcMethod(service.pull, pb.PullRequest.FromString)
    server = LocalPullServer(method, **patience)
    await server.listen()
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def calling(local: LocalAddress) -> AsyncIterator[tuple[LocalPullClient, AsyncMock]]:
    """Gives the client, and the pull over the network that it must not make without need."""
    network = create_autospec(PullClient, instance=True)
    client = LocalPullClient(local, network)
    try:
        yield client, network.pull
    finally:
        await client.close()


async def connected(server: LocalPullServer) -> socket.socket:
    """Returns a socket that speaks for itself."""
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, server.address.path)
    return sock


def call_frame(server: LocalPullServer) -> bytes:
    return frame(LocalFrame.CALL, server.address.key + REQUEST.SerializeToString())


# Frames -----------------------------------------------------------------------------------------

frames = st.lists(st.tuples(st.sampled_from(LocalFrame), st.binary(max_size=200)), max_size=8)


@given(frames, st.lists(st.integers(1, 60), min_size=1))
def test_frames_are_the_same_however_they_arrive(
    sent: list[tuple[LocalFrame, bytes]], sizes: list[int]
) -> None:
    data, reader = b"".join(frame(*one) for one in sent), FrameReader(200)
    found: list[tuple[LocalFrame, bytes]] = []
    turn = 0
    while data:
        size = sizes[turn % len(sizes)]
        found += reader.feed(data[:size])
        data, turn = data[size:], turn + 1
    assert found == sent


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_junk_is_refused_or_waits_for_more_within_the_limit(pieces: list[bytes]) -> None:
    reader, num_bytes = FrameReader(100), 0
    try:
        for piece in pieces:
            num_bytes += len(piece)
            for kind, payload in reader.feed(piece):
                assert kind in LocalFrame and len(payload) <= 100
                num_bytes -= HEAD.size + len(payload)
    except FrameError:
        return
    assert num_bytes <= HEAD.size + 100, "what is kept is a part of one frame"


# Calls ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 63, 64, 65, 5000, 1 << 20])
async def test_messages_arrive_whole_and_in_order(size: int) -> None:
    service = Service([bytes([i]) * size for i in range(5)])
    async with serving(service) as server, calling(server.address) as (client, network):
        for _ in range(2):
            sink = Sink()
            await client.pull("prefill:1", 0, REQUEST, sink)
            assert sink.messages == service.messages
        assert service.requests == [REQUEST, REQUEST] and service.num_sent == 10
        assert server.num_connections == client.num_connections == 1
        network.assert_not_called()


async def test_calls_at_the_same_time_have_connections_of_their_own() -> None:
    service = Service([b"m"], ending="never")
    async with serving(service) as server, calling(server.address) as (client, _):
        pulls = [asyncio.create_task(client.pull("p", 0, REQUEST, Sink())) for _ in range(3)]
        await until(lambda: service.num_open == 3)
        assert client.num_connections == 3
        pulls[0].cancel()
        await until(lambda: service.num_open == 2)
        assert client.num_connections == 2, "a cancelled call takes its connection with it"
        await server.close()
        ended = await asyncio.gather(*pulls[1:], return_exceptions=True)
        assert all(isinstance(error, PeerLost) for error in ended)
        assert service.num_open == 0


@pytest.mark.parametrize(
    ("ending", "error", "says"),
    [("not served", NotServed, "not that way"), ("error", PeerLost, "the log says why")],
)
async def test_a_refusal_says_why_and_keeps_the_connection(
    ending: str, error: type[Exception], says: str
) -> None:
    service = Service([], ending)
    async with serving(service) as server, calling(server.address) as (client, network):
        for _ in range(2):
            with pytest.raises(error, match=says):
                await client.pull("prefill:1", 0, REQUEST, Sink())
        assert server.num_connections == 1
        network.assert_not_called()


async def test_what_the_sink_refuses_ends_the_call() -> None:
    service = Service([b"x" * 100], ending="never")
    async with serving(service) as server, calling(server.address) as (client, _):
        with pytest.raises(CorruptChunk, match="too long"):
            await client.pull("prefill:1", 0, REQUEST, Sink(most_bytes=99))
        await until(lambda: service.num_open == 0 and server.num_connections == 0)


# Whoever else knocks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 100,
        frame(LocalFrame.CALL, bytes(KEY_BYTES) + REQUEST.SerializeToString()),
        frame(LocalFrame.CALL),
        frame(LocalFrame.MESSAGE, b"m"),
        HEAD.pack(1 << 31, LocalFrame.CALL),
    ],
    ids=["junk", "no key", "nothing", "a message", "huge"],
)
async def test_whoever_is_no_puller_is_hung_up_on_and_hurts_nobody(data: bytes) -> None:
    service = Service()
    async with serving(service) as server, calling(server.address) as (client, _):
        stranger = await connected(server)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(stranger, data)
        assert await loop.sock_recv(stranger, 1) == b""
        assert not service.requests
        await client.pull("prefill:1", 0, REQUEST, Sink())
        assert server.num_connections == 1
        stranger.close()


async def test_a_second_call_before_the_end_of_the_first_ends_both() -> None:
    service = Service([], ending="never")
    async with serving(service) as server:
        stranger = await connected(server)
        await asyncio.get_running_loop().sock_sendall(stranger, 2 * call_frame(server))
        await until(lambda: server.num_connections == 0)
        assert service.num_open == 0
        stranger.close()


async def test_a_request_that_cannot_be_read_is_refused() -> None:
    async with serving(Service()) as server:
        stranger = await connected(server)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(stranger, frame(LocalFrame.CALL, server.address.key + b"\xff\xff"))
        answer = await loop.sock_recv(stranger, 1000)
        assert answer[HEAD.size] == grpc.StatusCode.INTERNAL.value[0]
        stranger.close()


async def test_other_users_are_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Service()) as server:
        monkeypatch.setattr(local_pull_server, "peer_of", lambda _: (1, os.getuid() + 1))
        stranger = await connected(server)
        assert await asyncio.get_running_loop().sock_recv(stranger, 1) == b""
        assert server.num_connections == 0
        stranger.close()


async def test_a_puller_that_does_not_read_is_waited_for_without_memory() -> None:
    service = Service([bytes(1 << 20)] * 16)
    async with serving(service) as server:
        stranger = await connected(server)
        await asyncio.get_running_loop().sock_sendall(stranger, call_frame(server))
        await until(lambda: service.num_sent == 1)
        for _ in range(50):
            await asyncio.sleep(0)
        assert service.num_sent == 1 and service.num_open == 1
        stranger.close()
        await until(lambda: service.num_open == 0)
        assert service.num_dropped <= 1


async def test_a_silent_puller_is_asked_and_one_that_does_not_answer_is_left() -> None:
    service = Service([], ending="never")
    patience = {"ping_after_s": 0.2, "give_up_after_s": 1.0}
    async with (
        serving(service, **patience) as server,
        calling(server.address) as (client, _),
    ):
        well = asyncio.create_task(client.pull("prefill:1", 0, REQUEST, Sink()))
        await until(lambda: service.num_open == 1)
        frozen = await connected(server)
        await asyncio.get_running_loop().sock_sendall(frozen, call_frame(server))
        await until(lambda: service.num_open == 2)
        await until(lambda: service.num_open == 1)
        assert not well.done(), "it was silent for longer, but has answered"
        well.cancel()
        frozen.close()


async def test_a_server_that_was_held_up_itself_leaves_nobody() -> None:
    """The answer to its question is in the socket, unread."""
    service = Service([], ending="never")
    async with (
        serving(service, ping_after_s=0.1, give_up_after_s=0.5) as server,
        calling(server.address) as (client, _),
    ):
        pull = asyncio.create_task(client.pull("prefill:1", 0, REQUEST, Sink()))
        await until(lambda: service.num_open == 1)
        await all_tasks_are_held_up(0.7)
        for _ in range(50):
            await asyncio.sleep(0)
        assert service.num_open == 1 and not pull.done()
        pull.cancel()


# Where it cannot be -----------------------------------------------------------------------------


async def test_where_nobody_listens_calls_go_over_the_network(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with calling(LocalAddress.new()) as (client, network):
        for _ in range(2):
            await client.pull("prefill:1", 3, REQUEST, sink := Sink())
            network.assert_awaited_with("prefill:1", 3, REQUEST, sink)
    assert network.await_count == 2
    assert sum("called over the network" in record.message for record in caplog.records) == 1


async def test_another_process_at_the_address_hears_nothing() -> None:
    service = Service()
    async with serving(service) as server:
        elsewhere = msgspec.structs.replace(server.address, pid=os.getppid())
        async with calling(elsewhere) as (client, network):
            await client.pull("prefill:1", 0, REQUEST, Sink())
            network.assert_awaited_once()
        await until(lambda: server.num_connections == 0)
        assert not service.requests


async def test_a_server_without_room_is_called_over_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_pull_server, "_MAX_CONNECTIONS", 1)
    async with serving(Service()) as server, calling(server.address) as (client, network):
        stranger = await connected(server)
        await until(lambda: server.num_connections == 1)
        await client.pull("prefill:1", 0, REQUEST, Sink())
        network.assert_awaited_once()
        stranger.close()


# Processes that die and freeze ------------------------------------------------------------------

HOLDER = """
import asyncio, sys
import msgspec
from kv_transfer.transports.cuda_ipc.local_pull_server import LocalPullServer
from edge.h2.out_message import OutMessage
from edge.h2.rpc_method import RpcMethod
from tandem_pb import kv_transfer_pb2 as pb

async def pull(request, call):
    while True:
        await call.write(OutMessage([b"alive"]))
        await asyncio.sleep(0.01)

async def main():
    server = LocalPullServer(RpcMethod(pull, pb.PullRequest.FromString))
    await server.listen()
    print(msgspec.msgpack.encode(server.address).hex(), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_holder_that_freezes_falls_silent_and_one_that_dies_is_noticed_at_once() -> None:
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        said = bytes.fromhex((await holder.stdout.readline()).decode())
        async with calling(msgspec.msgpack.decode(said, type=LocalAddress)) as (client, network):
            sink = Sink()
            pull = asyncio.create_task(client.pull("prefill:1", 0, REQUEST, sink))
            await until(lambda: len(sink.messages) > 3)
            holder.send_signal(signal.SIGSTOP)
            frozen = psutil.Process(holder.pid)
            await until(lambda: frozen.status() == psutil.STATUS_STOPPED)
            for _ in range(50):
                await asyncio.sleep(0)  # What it had sent is read.
            num_heard = len(sink.messages)
            await asyncio.sleep(0.1)
            assert len(sink.messages) == num_heard and not pull.done()
            holder.kill()
            with pytest.raises(PeerLost, match="prefill:1: the local connection broke"):
                await pull
            await client.pull("prefill:1", 0, REQUEST, sink)
            network.assert_awaited_once()
    finally:
        if holder.returncode is None:
            holder.kill()
        await holder.wait()
