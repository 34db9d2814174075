"""In which order calls of one connection are sent, and how much is committed ahead."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from edge.h2 import writer
from edge.h2.out_message import OutMessage
from edge.h2.send_pace import MAX_AHEAD, SendPace
from edge.h2.send_threads import SendThreads
from edge.h2.writer import H2Writer, Segment

KIB = 1 << 10


# How much ahead ---------------------------------------------------------------------------------


@dataclass
class Pace:
    limits: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pace = SendPace(self.limits.append)

    def full(self, num_bytes: int, now: float) -> int:
        self.pace.sent(num_bytes, now, is_full=True, has_more=True)
        return self.pace.ahead

    def taken(self, now: float, *, has_more: bool = True) -> int:
        self.pace.sent(KIB, now, is_full=False, has_more=has_more)
        return self.pace.ahead


def test_a_path_that_takes_all_soon_has_no_bound() -> None:
    pace = Pace()
    assert [pace.taken(0.0) for _ in range(4)] == [512 * KIB, 1024 * KIB, MAX_AHEAD, MAX_AHEAD]
    assert pace.limits[-1] == 0


def test_a_slow_path_has_20_ms_ahead_and_twice_as_much_in_the_kernel() -> None:
    pace = Pace()
    assert pace.full(KIB, 1.0) == 256 * KIB, "nothing to compare with"
    assert pace.full(2_000_000, 2.0) == 40_000
    assert pace.limits[-1] == 80_000
    assert pace.full(1000, 3.0) == 16 * KIB, "a frame has its length"
    assert pace.full(500_000_000, 4.0) == MAX_AHEAD
    assert pace.limits[-1] == 0


def test_pauses_without_anything_to_send_do_not_count() -> None:
    pace = Pace()
    pace.full(KIB, 1.0)
    pace.taken(1.5, has_more=False)
    before = pace.pace.ahead
    assert pace.full(KIB, 100.0) == before
    assert pace.full(2_000_000, 101.0) == 40_000


def test_a_kernel_that_had_nothing_left_asks_for_more() -> None:
    pace = Pace()
    pace.full(KIB, 1.0)
    assert pace.full(2_000_000, 2.0) == 40_000
    pace.pace.ran_dry()
    assert pace.pace.ahead == 80_000
    assert pace.full(KIB, 3.0) == 80_000, "what was taken meanwhile says nothing of the path"


# Order ------------------------------------------------------------------------------------------


class Call:
    """A source with one message, cut as the writer asks."""

    def __init__(self, name: bytes, num_bytes: int, to_come: int = 0) -> None:
        self.message = OutMessage([name * num_bytes])
        self.left = self.message.num_wire_bytes
        self.to_come = to_come

    @property
    def has_more(self) -> bool:
        return self.left > 0

    @property
    def bytes_left(self) -> int:
        return self.left + self.to_come

    def next_segment(self, limit: int) -> Segment | None:
        start = self.message.num_wire_bytes - self.left
        stop = min(start + limit, self.message.num_wire_bytes)
        self.left -= stop - start
        return Segment(b"", self.message, start, stop)

    def was_sent(self, segment: Segment) -> None:
        return


class Wire:
    """A writer whose socket is full at first, and what comes out at the other end."""

    def __init__(self) -> None:
        here, self.there = socket.socketpair()
        for end in (here, self.there):
            end.setblocking(False)
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * KIB)
        self.threads = SendThreads(1)
        self.writer = H2Writer(here, self.threads, lambda error: None)
        self.writer.max_frame_bytes = 16 * KIB
        self.writer.grow_window(1 << 30)

    async def read(self, until: bytes) -> bytes:
        """Returns the names of calls in the order in which they came, until the last byte."""
        loop = asyncio.get_running_loop()
        came = b""
        async with asyncio.timeout(60):
            while not came.endswith(until):
                data = await loop.sock_recv(self.there, 1 << 20)
                for byte in data.lstrip(b"\0"):
                    if bytes([byte]).isalpha() and not came.endswith(bytes([byte])):
                        came += bytes([byte])
        return came

    def close(self) -> None:
        self.writer.close()
        self.there.close()
        self.threads.close()


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


async def test_the_call_with_least_to_send_comes_first(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that it waits for nothing but what is cut already."""
    monkeypatch.setattr(writer, "_LONGEST_WAIT_S", 1000.0)
    for name, to_come in ((b"L", 1 << 30), (b"M", 1 << 20), (b"S", 0)):
        wire.writer.add(Call(name, 600 * KIB, to_come))
    assert await wire.read(b"SML") == b"LSML"


async def test_calls_that_have_waited_take_turns(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_LONGEST_WAIT_S", -1.0)
    wire.writer.add(Call(b"L", 600 * KIB, 1 << 30))
    wire.writer.add(Call(b"S", 600 * KIB))
    assert await wire.read(b"SLS") == b"LSLS"
