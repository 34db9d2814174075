"""Bytes become messages however they are cut; whatever else the server does ends the call."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import h2_frames as h2
from kv_transfer.errors import CorruptChunk, PeerLost
from kv_transfer.h2_connection import CallRefused, H2Connection
from kv_transfer.wire import ByteArray

DATA, HEADERS = h2.FrameKind.DATA, h2.FrameKind.HEADERS
OK_HEADERS = h2.frame(HEADERS, h2.END_HEADERS, 1, b"\x88")


def trailers(status: int, message: str = "") -> bytes:
    fields = {"grpc-status": str(status), "grpc-message": message}
    block = b"".join(b"\0" + h2._string(k) + h2._string(v) for k, v in fields.items())
    return h2.frame(HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, block)


def framed(messages: list[bytes], frame_sizes: list[int], between: list[bytes]) -> bytes:
    """gRPC messages in DATA frames of the given sizes (again and again), with other frames
    between them."""
    stream = b"".join(b"\0" + len(m).to_bytes(4) + m for m in messages)
    out, at, i = b"", 0, 0
    while at < len(stream):
        size = frame_sizes[i % len(frame_sizes)]
        out += h2.frame(DATA, 0, 1, stream[at : at + size]) + between[i % len(between)]
        at += size
        i += 1
    return out


class Wire(asyncio.Transport):
    """What the connection wrote, and whether it was ended."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_aborted = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written += data

    def abort(self) -> None:
        self.is_aborted = True


def feed(connection: H2Connection, data: bytes, cuts: Callable[[int], int]) -> None:
    """As asyncio does: at most as much as the connection has room for, until it is ended."""
    at = 0
    while at < len(data) and not connection._is_closed:
        buffer = connection.get_buffer(-1)
        count = min(len(buffer), len(data) - at, max(1, cuts(len(buffer))))
        buffer[:count] = data[at : at + count]
        connection.buffer_updated(count)
        at += count


async def answer(
    data: bytes, cuts: Callable[[int], int], take: Callable[[ByteArray], None]
) -> tuple[H2Connection, Wire]:
    """One call whose answer is `data`; raises what the call raises."""
    connection, wire = H2Connection("host:1"), Wire()
    connection.connection_made(wire)
    call = asyncio.create_task(connection.call("/s/m", b"request", take))
    await asyncio.sleep(0)
    feed(connection, data, cuts)
    async with asyncio.timeout(60):
        await call
    return connection, wire


PING = h2.frame(h2.FrameKind.PING, 0, 0, b"12345678")
SETTINGS = h2.frame(h2.FrameKind.SETTINGS, 0, 0)
UNKNOWN = h2.frame(h2.FrameKind.WINDOW_UPDATE, 0, 0, b"\0\0\1\0")


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300_000), max_size=6),
    frame_sizes=st.lists(
        st.one_of(st.integers(1, 20), st.integers(1000, 200_000)), min_size=1, max_size=4
    ),
    between=st.lists(st.sampled_from([b"", PING, SETTINGS, UNKNOWN]), min_size=1, max_size=3),
    seed=st.integers(0, 1 << 30),
)
def test_messages_arrive_whole_however_they_are_cut(
    sizes: list[int], frame_sizes: list[int], between: list[bytes], seed: int
) -> None:
    if min(frame_sizes) < 1000:
        sizes = [size % 3000 + 1 for size in sizes]
    rng = random.Random(seed)
    messages = [rng.randbytes(size) for size in sizes]
    arrived: list[bytes] = []
    data = OK_HEADERS + framed(messages, frame_sizes, between) + trailers(0)
    connection, wire = asyncio.run(
        answer(
            data,
            lambda room: rng.choice([room, rng.randint(1, room), rng.randint(1, 30)]),
            lambda message: arrived.append(message.tobytes()),
        )
    )
    assert arrived == messages
    assert connection.is_usable and not wire.is_aborted
    num_pings = data.count(PING)
    assert wire.written.count(h2.frame(h2.FrameKind.PING, h2.ACK, 0, b"12345678")) == num_pings


def whole(room: int) -> int:
    return room


async def test_a_second_call_uses_the_next_stream() -> None:
    connection, wire = await answer(OK_HEADERS + trailers(0), whole, lambda message: None)
    call = asyncio.create_task(connection.call("/s/m", b"again", lambda message: None))
    await asyncio.sleep(0)
    assert not connection.is_usable
    assert wire.written.endswith(h2.request(3, "/s/m", "host:1", b"again"))
    feed(connection, OK_HEADERS + trailers(0), whole)
    await call
    assert connection.is_usable


async def test_a_status_is_an_answer_and_the_connection_stays() -> None:
    connection, wire = H2Connection("host:1"), Wire()
    connection.connection_made(wire)
    call = asyncio.create_task(connection.call("/s/m", b"", lambda message: None))
    await asyncio.sleep(0)
    feed(connection, trailers(5, "transfer 7%25 is unknown"), whole)
    with pytest.raises(CallRefused) as refused:
        await call
    assert refused.value.code is grpc.StatusCode.NOT_FOUND
    assert refused.value.details == "transfer 7% is unknown"
    assert connection.is_usable


async def fails_with(data: bytes, why: str) -> None:
    connection, wire = H2Connection("host:1"), Wire()
    connection.connection_made(wire)
    call = asyncio.create_task(connection.call("/s/m", b"", lambda message: None))
    await asyncio.sleep(0)
    feed(connection, data, whole)
    with pytest.raises(PeerLost, match=why):
        await call
    assert wire.is_aborted and not connection.is_usable


BROKEN = {
    "reset": (h2.frame(h2.FrameKind.RST_STREAM, 0, 1, b"\0\0\0\x08"), "reset with code 8"),
    "going": (h2.frame(h2.FrameKind.GOAWAY, 0, 0, bytes(8)), "going away"),
    "status": (h2.frame(HEADERS, h2.END_HEADERS, 1, b"\x8d"), "HTTP status 404"),
    "padded": (h2.frame(DATA, h2.PADDED, 1, b"\1ab\0"), "padded"),
    "compressed": (h2.frame(DATA, 0, 1, b"\1\0\0\0\5hello"), "compressed"),
    "huge": (h2.frame(DATA, 0, 1, b"\0\xff\xff\xff\xff"), "4294967295 bytes"),
    "half": (h2.frame(DATA, 0, 1, b"\0\0\0\0\5hel") + trailers(0), "middle of a message"),
    "long": (h2.frame(h2.FrameKind.SETTINGS, 0, 0, bytes(70_000)), "70000 bytes"),
    "noise": (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10, "host:1"),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_what_is_not_understood_ends_the_call_and_the_connection(case: str) -> None:
    await fails_with(*BROKEN[case])


async def test_the_peer_hangs_up() -> None:
    connection, wire = H2Connection("host:1"), Wire()
    connection.connection_made(wire)
    call = asyncio.create_task(connection.call("/s/m", b"", lambda message: None))
    await asyncio.sleep(0)
    connection.connection_lost(ConnectionResetError("reset"))
    with pytest.raises(PeerLost, match="reset"):
        await call


async def test_what_the_taker_raises_ends_the_call() -> None:
    def take(message: ByteArray) -> None:
        raise CorruptChunk("not mine")

    with pytest.raises(CorruptChunk, match="not mine"):
        await answer(OK_HEADERS + framed([b"a"], [100], [b""]), whole, take)


async def test_a_cancelled_call_takes_nothing_more() -> None:
    taken: list[int] = []
    connection, wire = H2Connection("host:1"), Wire()
    connection.connection_made(wire)
    call = asyncio.create_task(connection.call("/s/m", b"", lambda m: taken.append(len(m))))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert wire.is_aborted and not connection.is_usable and not taken


@settings(max_examples=150, deadline=None)
@given(st.binary(min_size=1, max_size=400), st.booleans())
def test_noise_never_hangs_the_parser(noise: bytes, is_after_headers: bool) -> None:
    async def run() -> None:
        connection, wire = H2Connection("host:1"), Wire()
        connection.connection_made(wire)
        call = asyncio.create_task(connection.call("/s/m", b"", lambda message: None))
        await asyncio.sleep(0)
        feed(connection, (OK_HEADERS if is_after_headers else b"") + noise, whole)
        connection.connection_lost(None)
        ended: Awaitable[list[object]] = asyncio.gather(call, return_exceptions=True)
        (result,) = await ended
        assert result is None or isinstance(result, PeerLost | CallRefused)

    asyncio.run(run())
