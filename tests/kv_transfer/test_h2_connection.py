"""Bytes become messages however they are cut; whatever else the server does ends the call."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable
from contextlib import suppress

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.h2 import frames as h2
from kv_transfer.errors import CorruptChunk, PeerLost
from kv_transfer.transports.stream.h2.connection import _WINDOW_UPDATE_BYTES as TOLD_AT_ONCE
from kv_transfer.transports.stream.h2.connection import CallRefused, H2Connection
from kv_transfer.transports.stream.h2.receive_threads import ReceiveThreads
from kv_transfer.wire.pull_client import HEAD_BYTES

DATA, HEADERS = h2.FrameKind.DATA, h2.FrameKind.HEADERS
OK_HEADERS = h2.frame(HEADERS, h2.END_HEADERS, 1, b"\x88")


def trailers(status: int, message: str = "") -> bytes:
    return h2.trailers(1, status, message, is_first=False)


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


class Wire:
    """The socket under the connection: it gives `data` in pieces, and keeps what is written."""

    def __init__(self, cuts: Callable[[int], int] = lambda room: room) -> None:
        self.data = b""
        self.has_ended = False
        self.written = b""
        self.is_closed = False
        self._cuts = cuts
        self._ends = socket.socketpair()

    def fileno(self) -> int:
        return self._ends[0].fileno()

    def recvmsg_into(self, views: list[memoryview]) -> tuple[int]:
        room = sum(len(view) for view in views)
        count = min(room, len(self.data), max(1, self._cuts(room)))
        if count == 0 and not self.has_ended:
            raise BlockingIOError
        piece, self.data = self.data[:count], self.data[count:]
        for view in views:
            view[: len(piece)] = piece[: len(view)]
            piece = piece[len(view) :]
        return (count,)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_RCVLOWAT) and value > 0

    def send(self, data: bytes) -> int:
        self.written += data
        return len(data)

    def close(self) -> None:
        self.is_closed = True
        for end in self._ends:
            end.close()


class Sink:
    """Keeps every message; `views` cuts the memory for it into pieces."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.messages: list[bytes] = []
        self._rng = rng or random.Random(0)
        self._memory = bytearray()
        self._num_filled = 0

    def begin(self, head: bytes, num_bytes: int) -> list[memoryview]:
        assert len(head) == min(HEAD_BYTES, num_bytes)
        self._memory = bytearray(num_bytes)
        self._memory[: len(head)] = head
        rest = memoryview(self._memory)[len(head) :]
        views = []
        while rest:
            size = self._rng.randint(1, len(rest))
            views.append(rest[:size])
            rest = rest[size:]
        return views

    def fill(self, part: memoryview) -> None:
        self._num_filled += len(part)

    def end(self) -> None:
        assert self._num_filled == max(0, len(self._memory) - HEAD_BYTES)
        self._num_filled = 0
        self.messages.append(bytes(self._memory))


async def feed(connection: H2Connection, wire: Wire, data: bytes) -> None:
    """Feeds until all is read, or the connection has ended."""
    wire.data += data
    while wire.data and not connection._is_closed:
        if connection._reading is None:
            connection._read()
        await connection._is_unread.wait()


NO_THREADS = ReceiveThreads(0)
THREADS = [NO_THREADS, ReceiveThreads(2, worth_bytes=1), ReceiveThreads(2, worth_bytes=1000)]


def new_connection(wire: Wire, threads: ReceiveThreads = NO_THREADS) -> H2Connection:
    return H2Connection("host:1", wire, threads)  # type: ignore[arg-type]


async def answer(
    data: bytes,
    sink: Sink,
    cuts: Callable[[int], int] = lambda room: room,
    threads: ReceiveThreads = NO_THREADS,
) -> tuple[H2Connection, Wire]:
    """One call whose answer is `data`; raises what the call raises."""
    wire = Wire(cuts)
    connection = new_connection(wire, threads)
    call = asyncio.create_task(connection.call("/s/m", b"request", sink))
    await asyncio.sleep(0)
    await feed(connection, wire, data)
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
    threads=st.sampled_from(THREADS),
    seed=st.integers(0, 1 << 30),
)
def test_messages_arrive_whole_however_they_are_cut(
    sizes: list[int],
    frame_sizes: list[int],
    between: list[bytes],
    threads: ReceiveThreads,
    seed: int,
) -> None:
    """Read by the event loop and by threads."""
    if min(frame_sizes) < 1000:
        sizes = [size % 3000 + 1 for size in sizes]
    rng = random.Random(seed)
    messages = [rng.randbytes(size) for size in sizes]
    sink = Sink(rng)
    data = OK_HEADERS + framed(messages, frame_sizes, between) + trailers(0)

    async def run() -> Wire:
        connection, wire = await answer(
            data,
            sink,
            lambda room: rng.choice([room, rng.randint(1, room), rng.randint(1, 30)]),
            threads,
        )
        assert connection.is_usable and not wire.is_closed
        connection.close()
        return wire

    wire = asyncio.run(run())
    assert sink.messages == messages
    num_pings = data.count(PING)
    assert wire.written.count(h2.frame(h2.FrameKind.PING, h2.ACK, 0, b"12345678")) == num_pings


async def test_a_second_call_uses_the_next_stream() -> None:
    connection, wire = await answer(OK_HEADERS + trailers(0), Sink())
    call = asyncio.create_task(connection.call("/s/m", b"again", Sink()))
    await asyncio.sleep(0)
    assert not connection.is_usable
    assert wire.written.endswith(h2.request(3, "/s/m", "host:1", b"again"))
    await feed(connection, wire, OK_HEADERS + trailers(0))
    await call
    assert connection.is_usable
    connection.close()


async def test_windows_grow_by_what_was_sent() -> None:
    """Never by more, and the connection's is never used up by many calls, each smaller than what
    is told at once: after 2 GiB the server would have to stop for ever."""
    sizes = [40 << 20, 40 << 20, 70 << 20]
    connection, wire = await answer(OK_HEADERS + trailers(0), Sink())
    told = {0: 0}
    for call_number, size in enumerate(sizes, start=1):
        stream = 2 * call_number + 1
        wire.written = b""
        call = asyncio.create_task(connection.call("/s/m", b"", Sink()))
        await asyncio.sleep(0)
        whole, num_frames = b"\0" + size.to_bytes(4) + bytes(size), 10
        cut = -(-len(whole) // num_frames)
        for i in range(0, len(whole), cut):
            await feed(connection, wire, h2.frame(DATA, 0, stream, whole[i : i + cut]))
        await feed(connection, wire, h2.trailers(stream, 0, "", is_first=False))
        await call
        written = memoryview(wire.written)
        while written:
            length, kind, _, of = h2.parse_frame_header(written)
            if kind == h2.FrameKind.WINDOW_UPDATE:
                told[of] = told.get(of, 0) + int.from_bytes(written[9:13])
            written = written[9 + length :]
        assert told.get(stream, 0) <= len(whole)
    sent = sum(sizes) + 5 * len(sizes)
    assert sent - TOLD_AT_ONCE < told[0] <= sent
    connection.close()


async def test_a_status_is_an_answer_and_the_connection_stays() -> None:
    """Even in the middle of a message."""
    for before in (b"", OK_HEADERS + h2.frame(DATA, 0, 1, b"\0\0\0\0\5hel")):
        wire = Wire()
        connection = new_connection(wire)
        call = asyncio.create_task(connection.call("/s/m", b"", Sink()))
        await asyncio.sleep(0)
        await feed(connection, wire, before + trailers(5, "transfer 7% is unknown"))
        with pytest.raises(CallRefused) as refused:
            await call
        assert refused.value.code is grpc.StatusCode.NOT_FOUND
        assert refused.value.details == "transfer 7% is unknown"
        assert connection.is_usable
        connection.close()


async def fails_with(data: bytes, why: str) -> None:
    wire = Wire()
    connection = new_connection(wire)
    call = asyncio.create_task(connection.call("/s/m", b"", Sink()))
    await asyncio.sleep(0)
    await feed(connection, wire, data)
    with pytest.raises(PeerLost, match=why):
        await call
    assert wire.is_closed and not connection.is_usable


BROKEN = {
    "reset": (h2.reset(1, h2.ErrorCode.CANCEL), "reset with code 8"),
    "gone": (h2.go_away(0, h2.ErrorCode.NO_ERROR), "going away"),
    "angry": (h2.go_away(1, h2.ErrorCode.ENHANCE_YOUR_CALM, "too many"), "away too many"),
    "status": (h2.frame(HEADERS, h2.END_HEADERS, 1, b"\x8d"), "HTTP status 404"),
    "padded": (h2.frame(DATA, h2.PADDED, 1, b"\1ab\0"), "padded"),
    "compressed": (h2.frame(DATA, 0, 1, b"\1\0\0\0\5hello"), "compressed"),
    "huge": (h2.frame(DATA, 0, 1, b"\0\xff\xff\xff\xff"), "4294967295 bytes"),
    "half": (h2.frame(DATA, 0, 1, b"\0\0\0\0\5hel") + trailers(0), "middle of a message"),
    "long": (h2.frame(h2.FrameKind.SETTINGS, 0, 0, bytes(70_000)), "70000 bytes"),
    "foreign": (h2.frame(DATA, 0, 3, b"\0\0\0\0\1a"), "without a call"),
    "noise": (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10, "host:1"),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_what_is_not_understood_ends_the_call_and_the_connection(case: str) -> None:
    await fails_with(*BROKEN[case])


async def test_a_server_that_goes_may_finish_its_call() -> None:
    data = OK_HEADERS + h2.go_away(1, h2.ErrorCode.NO_ERROR)
    sink = Sink()
    connection, _ = await answer(data + framed([b"last"], [100], [b""]) + trailers(0), sink)
    assert sink.messages == [b"last"] and not connection.is_usable
    connection.close()


async def test_the_peer_hangs_up() -> None:
    wire = Wire()
    connection = new_connection(wire)
    call = asyncio.create_task(connection.call("/s/m", b"", Sink()))
    await asyncio.sleep(0)
    wire.has_ended = True
    connection._read()
    with pytest.raises(PeerLost, match="closed by it"):
        await call


async def test_what_the_sink_raises_ends_the_call() -> None:
    class Refusing(Sink):
        def end(self) -> None:
            raise CorruptChunk("not mine")

    with pytest.raises(CorruptChunk, match="not mine"):
        await answer(OK_HEADERS + framed([b"a"], [100], [b""]), Refusing())


async def test_a_cancelled_call_takes_nothing_more() -> None:
    sink, wire = Sink(), Wire()
    connection = new_connection(wire)
    call = asyncio.create_task(connection.call("/s/m", b"", sink))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert wire.is_closed and not connection.is_usable and not sink.messages


@settings(max_examples=150, deadline=None)
@given(st.binary(min_size=1, max_size=400), st.booleans())
def test_noise_never_hangs_the_parser(noise: bytes, is_after_headers: bool) -> None:
    async def run() -> None:
        wire = Wire()
        connection = new_connection(wire)
        call = asyncio.create_task(connection.call("/s/m", b"", Sink()))
        await asyncio.sleep(0)
        await feed(connection, wire, (OK_HEADERS if is_after_headers else b"") + noise)
        connection.close()
        with suppress(PeerLost, CallRefused):
            await call

    asyncio.run(run())
