"""Calls end alike whether threads or the event loop read, and nothing is written afterwards."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from edge.h2 import frames as h2
from kv_transfer.errors import CorruptChunk, PeerLost
from kv_transfer.transports.stream.h2.connection import H2Connection
from kv_transfer.transports.stream.h2.receive_threads import ReceiveThreads

SIZE = 100_000
DATA = h2.FrameKind.DATA
BEGINNING = h2.frame(h2.FrameKind.HEADERS, h2.END_HEADERS, 1, b"\x88")
MESSAGE = h2.frame(DATA, 0, 1, b"\0" + SIZE.to_bytes(4) + bytes(range(250)) * (SIZE // 250))
HALF = len(MESSAGE) // 2
END = h2.trailers(1, 0, "", is_first=False)


class Sink:
    """Takes messages of SIZE bytes; `hold` lets a thread wait that tells of a piece of one."""

    def __init__(self) -> None:
        self.is_free = threading.Event()
        self.is_free.set()
        self.was_told = threading.Event()
        self.memory = bytearray(SIZE)
        self.num_filled = 0
        self.num_ended = 0

    def hold(self) -> None:
        self.is_free.clear()

    def begin(self, head: bytes, num_bytes: int) -> list[memoryview]:
        self.memory[: len(head)] = head
        return [memoryview(self.memory)[len(head) :]]

    def fill(self, part: memoryview) -> None:
        self.num_filled += len(part)
        if threading.current_thread() is not threading.main_thread():
            self.was_told.set()
            assert self.is_free.wait(60)

    def end(self) -> None:
        self.num_ended += 1


@pytest.fixture
def threads() -> Iterator[ReceiveThreads]:
    """One thread: whatever keeps it keeps everybody."""
    made = ReceiveThreads(1, worth_bytes=1000)
    yield made
    made.close()


@asynccontextmanager
async def called(
    threads: ReceiveThreads, sink: Sink
) -> AsyncIterator[tuple[H2Connection, socket.socket, asyncio.Task[None]]]:
    """Yields a connection, the server's end, and a call."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    connection = H2Connection("host:1", ours, threads)
    call = asyncio.create_task(connection.call("/s/m", b"request", sink))
    await asyncio.sleep(0)
    try:
        yield connection, theirs, call
    finally:
        sink.is_free.set()
        connection.close()
        theirs.close()
        await asyncio.gather(call, return_exceptions=True)


async def say(theirs: socket.socket, data: bytes) -> None:
    await asyncio.to_thread(theirs.sendall, data)


async def told(sink: Sink) -> None:
    assert await asyncio.to_thread(sink.was_told.wait, 60)


async def test_a_thread_reads_what_is_much(threads: ReceiveThreads) -> None:
    sink = Sink()
    async with called(threads, sink) as (connection, theirs, call):
        await say(theirs, BEGINNING + MESSAGE + MESSAGE[:HALF])
        await say(theirs, MESSAGE[HALF:] + END)
        async with asyncio.timeout(60):
            await call
        assert connection.is_usable
    assert sink.was_told.is_set() and sink.num_ended == 2
    assert sink.memory == bytes(range(250)) * (SIZE // 250)


async def test_a_cancelled_call_is_over_when_no_thread_writes_any_more(
    threads: ReceiveThreads,
) -> None:
    sink = Sink()
    sink.hold()
    async with called(threads, sink) as (connection, theirs, call):
        await say(theirs, BEGINNING + MESSAGE[:HALF])
        await told(sink)
        for _ in range(3):
            call.cancel()
            await asyncio.sleep(0.01)
        assert not call.done() and not connection.is_usable
        filled = sink.num_filled
        sink.is_free.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert sink.num_filled == filled and sink.num_ended == 0
        # The server sees that we are gone.
        theirs.settimeout(60)
        with pytest.raises(ConnectionError):
            while theirs.recv(1 << 20):
                pass
            raise ConnectionError


async def test_a_connection_that_is_closed_meanwhile_fails_its_call_behind_the_thread(
    threads: ReceiveThreads,
) -> None:
    sink = Sink()
    sink.hold()
    async with called(threads, sink) as (connection, theirs, call):
        await say(theirs, BEGINNING + MESSAGE[:HALF])
        await told(sink)
        connection.close()
        await asyncio.sleep(0.01)
        assert not call.done()
        sink.is_free.set()
        with pytest.raises(PeerLost, match="given up"):
            await call
    assert sink.num_ended == 0


async def test_a_peer_that_dies_in_the_middle(threads: ReceiveThreads) -> None:
    sink = Sink()
    async with called(threads, sink) as (connection, theirs, call):
        await say(theirs, BEGINNING + MESSAGE[:HALF])
        await told(sink)
        theirs.close()
        with pytest.raises(PeerLost, match="host:1 broke"):
            await call
        assert not connection.is_usable and sink.num_ended == 0


async def test_what_the_sink_raises_in_a_thread_ends_the_call(threads: ReceiveThreads) -> None:
    class Refusing(Sink):
        def fill(self, part: memoryview) -> None:
            raise CorruptChunk("not mine")

    async with called(threads, Refusing()) as (connection, theirs, call):
        await say(theirs, BEGINNING + MESSAGE)
        with pytest.raises(CorruptChunk, match="not mine"):
            await call
        assert not connection.is_usable


async def test_a_silent_peer_keeps_no_thread(threads: ReceiveThreads) -> None:
    """Though there is only one, and the silent one's message came first."""
    silent, lively = Sink(), Sink()
    async with (
        called(threads, silent) as (_, their_silent, silent_call),
        called(threads, lively) as (_, theirs, call),
    ):
        await say(their_silent, BEGINNING + MESSAGE[:HALF])
        await told(silent)
        await say(theirs, BEGINNING + MESSAGE + END)
        async with asyncio.timeout(60):
            await call
        assert lively.num_ended == 1 and not silent_call.done()
        await say(their_silent, MESSAGE[HALF:] + END)
        async with asyncio.timeout(60):
            await silent_call
    assert silent.num_ended == 1
