"""Our gRPC server under a stock gRPC client, and under peers that do not know how to behave."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.h2 import frames as h2
from edge.h2.out_message import OutMessage
from edge.h2.rpc_method import RpcMethod, ServerCall
from edge.h2.server import H2Server
from tests.awaited import until
from tests.edge.full_listener import FullListener

HEADERS, DATA = h2.FrameKind.HEADERS, h2.FrameKind.DATA
OPENING = h2.PREFACE + h2.settings_frame({})


class Service:
    """`/t/Echo` answers with its request, `/t/Parts` writes messages of the sizes asked for, in
    three parts each; a negative size is a refusal. `ends` is what became of each message."""

    def __init__(self) -> None:
        self.ends: list[bool] = []
        self.num_messages = 0
        self.num_running = 0

    def methods(self) -> dict[str, RpcMethod]:
        return {
            "/t/Echo": RpcMethod(self.echo, bytes, bytes),
            "/t/Parts": RpcMethod(self.parts, bytes),
        }

    async def echo(self, request: bytes, call: ServerCall) -> bytes:
        return request

    async def parts(self, request: bytes, call: ServerCall) -> None:
        self.num_running += 1
        try:
            for size in map(int, request.split()):
                if size < 0:
                    await call.abort(grpc.StatusCode.NOT_FOUND, "50% of ünlucky")
                data = memoryview(content(size))
                self.num_messages += 1
                cut = size // 3
                await call.write(
                    OutMessage([data[:cut], data[cut:-1], data[-1:]], self.ends.append)
                )
        finally:
            self.num_running -= 1


def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[str]:
    server = H2Server(service.methods())
    port = await server.listen("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.close()


def channel(address: str, **options: int) -> grpc.aio.Channel:
    names = {"grpc.max_receive_message_length": -1, "grpc.use_local_subchannel_pool": 1}
    named = {f"grpc.{name}": value for name, value in options.items()}
    return grpc.aio.insecure_channel(address, options=list({**names, **named}.items()))


SMALL_WINDOWS = {"http2.bdp_probe": 0, "http2.lookahead_bytes": 65_535}


async def pull(to: grpc.aio.Channel, sizes: list[int]) -> list[bytes]:
    call: Any = to.unary_stream("/t/Parts")(b" ".join(str(size).encode() for size in sizes))
    return [message async for message in call]


async def test_a_stock_client_gets_answers_streams_and_statuses() -> None:
    service = Service()
    async with serving(service) as address, channel(address) as client:
        for size in (0, 1, 16_384, 100_000):
            echoed: Any = await client.unary_unary("/t/Echo")(content(size))
            assert echoed == content(size)
        sizes = [3, 70_000, 5 << 20, 16_379, 16_384, 1 << 20]
        assert await pull(client, sizes) == [content(size) for size in sizes]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pull(client, [1000, -1])
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert refused.value.details() == "50% of ünlucky"
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await client.unary_unary("/t/Nothing")(b"")
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert service.num_running == 0
    assert len(service.ends) == service.num_messages


async def test_many_calls_share_a_connection_with_small_windows() -> None:
    service = Service()
    async with (
        serving(service) as address,
        channel(address, **SMALL_WINDOWS) as client,
    ):
        wishes = [[200_000 + i, 5, 90_000 * i + 3] for i in range(20)]
        answers = await asyncio.gather(*(pull(client, sizes) for sizes in wishes))
        assert answers == [[content(size) for size in sizes] for sizes in wishes]
        # A client may have read the last message before the server knows that it is written.
        await until(lambda: len(service.ends) == service.num_messages)
        assert service.ends == [True] * 60


async def test_what_a_puller_leaves_behind_is_dropped() -> None:
    """Calls cancelled in the middle, and a connection that goes away. What is not asked for does
    not fit into the windows."""
    service = Service()
    async with serving(service) as address:
        async with channel(address, **SMALL_WINDOWS) as client:
            call: Any = client.unary_stream("/t/Parts")(b"3000000 " * 50)
            await call.read()
            call.cancel()
            await until(lambda: service.num_running == 0)
            echoed: Any = await client.unary_unary("/t/Echo")(b"alive")
            assert echoed == b"alive"
            call = client.unary_stream("/t/Parts")(b"3000000 " * 50)
            await call.read()
        await until(lambda: service.num_running == 0)
        await until(lambda: len(service.ends) == service.num_messages)
        assert service.ends.count(False) >= 2


async def exchange(address: str, data: bytes, enough: Callable[[bytes], bool] | None) -> bytes:
    """Returns what the server says until that is enough, or it hangs up. `enough` None: we say no
    more."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    said = b""
    try:
        writer.write(data)
        if enough is None:
            writer.write_eof()
        async with asyncio.timeout(60):
            while enough is None or not enough(said):
                piece = await reader.read(1 << 16)
                if not piece:
                    break
                said += piece
    except ConnectionError:
        assert enough is None
    finally:
        writer.close()
    return said


def has_status(said: bytes) -> bool:
    return b"grpc-status" in said


def frames(data: bytes) -> dict[int, bytes]:
    """The last payload of each kind."""
    view, found = memoryview(data), {}
    while view:
        length, kind, _, _ = h2.parse_frame_header(view)
        found[kind] = bytes(view[9 : 9 + length])
        view = view[9 + length :]
    return found


CALL = h2.request(1, "/t/Echo", "h", b"x")
BEGUN = h2.headers(1, [(":path", "/t/Echo")])
WRONG = {
    "not HTTP/2": (b"GET / HTTP/1.1\r\n\r\n" + bytes(20), h2.ErrorCode.PROTOCOL_ERROR),
    "no settings": (h2.PREFACE + CALL, h2.ErrorCode.PROTOCOL_ERROR),
    "long frame": (OPENING + h2.frame(DATA, 0, 1, bytes(20_000)), h2.ErrorCode.FRAME_SIZE_ERROR),
    "even stream": (OPENING + h2.headers(2, []), h2.ErrorCode.PROTOCOL_ERROR),
    "used stream": (OPENING + CALL + h2.headers(1, []), h2.ErrorCode.PROTOCOL_ERROR),
    "data of nobody": (OPENING + h2.frame(DATA, 0, 5, b"x"), h2.ErrorCode.PROTOCOL_ERROR),
    "reset of nobody": (OPENING + h2.reset(5, h2.ErrorCode.CANCEL), h2.ErrorCode.PROTOCOL_ERROR),
    "push": (OPENING + h2.frame(h2.FrameKind.PUSH_PROMISE, 0, 1), h2.ErrorCode.PROTOCOL_ERROR),
    "huge window": (
        OPENING + h2.window_update(0, h2.MAX_WINDOW),
        h2.ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "no increment": (OPENING + h2.window_update(0, 0), h2.ErrorCode.PROTOCOL_ERROR),
    "bad header": (OPENING + h2.frame(HEADERS, h2.END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"),
                   h2.ErrorCode.COMPRESSION_ERROR),
    "torn header": (OPENING + h2.frame(HEADERS, 0, 1) + CALL, h2.ErrorCode.PROTOCOL_ERROR),
    "endless header": (
        OPENING
        + h2.frame(HEADERS, 0, 1)
        + h2.frame(h2.FrameKind.CONTINUATION, 0, 1, bytes(16_000)) * 2,
        h2.ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "endless request": (
        OPENING + BEGUN + h2.frame(DATA, 0, 1, bytes(16_000)) * 70,
        h2.ErrorCode.ENHANCE_YOUR_CALM,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_peer_is_told_why_and_left(case: str) -> None:
    data, code = WRONG[case]
    service = Service()
    async with serving(service) as address:
        said = frames(await exchange(address, data, None))
        goodbye = said.get(h2.FrameKind.GOAWAY)
        # What the server had not read yet turns its goodbye into a reset.
        assert goodbye is None or int.from_bytes(goodbye[4:8]) == code
        async with channel(address) as client:
            assert await pull(client, [10]) == [content(10)]


async def test_a_request_that_is_not_one_message_is_refused() -> None:
    async with serving(Service()) as address:
        for body in (b"", b"\0\0\0\0\5ab", b"\1\0\0\0\1a"):
            ended = h2.frame(DATA, h2.END_STREAM, 1, body)
            said = frames(await exchange(address, OPENING + BEGUN + ended, has_status))
            assert b"grpc-status" in said[HEADERS] and b"\x010" not in said[HEADERS]


async def test_calls_beyond_the_limit_are_refused_one_by_one() -> None:
    """Begun and never finished; the peer may come back when some have ended."""
    begun = b"".join(h2.headers(2 * i + 1, [(":path", "/t/Echo")]) for i in range(300))
    async with serving(Service()) as address:
        refusals = h2.frame_header(4, h2.FrameKind.RST_STREAM, 0, 0)[:5]
        await exchange(address, OPENING + begun, lambda said: said.count(refusals) == 300 - 256)


async def test_larger_windows_and_frames_are_used_behind_their_acknowledgement() -> None:
    """grpcio ends a connection that uses them before."""
    opening = h2.PREFACE + h2.settings_frame({h2.Setting.INITIAL_WINDOW_SIZE: 0})
    call = h2.window_update(0, 1 << 20) + h2.request(1, "/t/Parts", "h", b"300000 300000")
    larger = {h2.Setting.INITIAL_WINDOW_SIZE: 700_000, h2.Setting.MAX_FRAME_SIZE: 200_000}
    async with serving(Service()) as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(opening + call)
        kinds: list[tuple[int, int, int]] = []
        async with asyncio.timeout(60):
            while (HEADERS, h2.END_STREAM) not in [(k, f & h2.END_STREAM) for k, f, _ in kinds]:
                head = await reader.readexactly(h2.FRAME_HEADER_BYTES)
                length, kind, flags, _ = h2.parse_frame_header(bytearray(head))
                await reader.readexactly(length)
                kinds.append((kind, flags, length))
                if kind == HEADERS and not flags & h2.END_STREAM:
                    writer.write(h2.settings_frame(larger))
        writer.close()
    acknowledged = [i for i, (kind, flags, _) in enumerate(kinds)
                    if kind == h2.FrameKind.SETTINGS and flags & h2.ACK]  # fmt: skip
    data = [(i, length) for i, (kind, _, length) in enumerate(kinds) if kind == DATA]
    assert len(acknowledged) == 2 and data[0][0] > acknowledged[1]
    assert max(length for _, length in data) == 200_000


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=300), st.sampled_from([b"", h2.PREFACE, OPENING, OPENING + BEGUN]))
def test_noise_hurts_nobody(noise: bytes, before: bytes) -> None:
    async def run() -> None:
        service = Service()
        async with serving(service) as address:
            await exchange(address, before + noise, None)
            said = await exchange(address, OPENING + CALL, has_status)
            assert frames(said)[DATA] == b"\0\0\0\0\1x"

    asyncio.run(run())


async def test_whoever_cannot_be_accepted_takes_no_time_from_others() -> None:
    listener = FullListener()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = H2Server(Service().methods())
    server.serve(listener)
    async with channel(f"127.0.0.1:{listener.getsockname()[1]}") as client:
        echo: Any = client.unary_unary("/t/Echo")(b"still here", wait_for_ready=True)
        await until(lambda: listener.num_refused > 0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert listener.num_refused == 1
        listener.is_full = False
        assert await echo == b"still here"
    await server.close()


async def test_it_listens_where_it_was_told_and_nowhere_else() -> None:
    server = H2Server({})
    port = await server.listen("127.0.0.1", 0)
    with socket.socket() as other:
        assert other.connect_ex(("127.0.0.2", port)) != 0
    second = H2Server({})
    with pytest.raises(OSError):
        await second.listen("127.0.0.1", port)
    await second.close()
    await server.close()
    again = H2Server({})
    assert await again.listen("127.0.0.1", port) == port
    await again.close()
