"""Bodies of many senders have a bounded room together, and nobody holds it for long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from edge.http.bodies import body_room
from edge.http.bodies.body_room import FREE_BYTES, BodyRoom
from edge.http.connection.client_connection import BodyLimits, ClientDisconnected, read_json_body
from edge.http.errors import RequestTimeout

TIMEOUT_S = 30.0
JSON = {"content-type": "application/json"}
PART = FREE_BYTES
LONG = {**JSON, "content-length": str(9 * PART)}


class Sender:
    """Sends parts when it is let, and counts those that were read."""

    def __init__(self, num_parts: int, *, is_slow: bool = False) -> None:
        self.num_parts = num_parts
        self.num_read = 0
        self.may_send = asyncio.Semaphore(0 if is_slow else num_parts)

    async def receive(self) -> dict[str, object]:
        await self.may_send.acquire()
        self.num_read += 1
        more = self.num_read < self.num_parts
        return {"type": "http.request", "body": b" " * PART, "more_body": more}


async def read(sender: Sender, limits: BodyLimits) -> int:
    with limits.room.lease() as lease:
        body = await read_json_body(JSON, sender.receive, limits, lease)
        return len(body)


@contextlib.asynccontextmanager
async def reading(
    senders: list[Sender], limits: BodyLimits
) -> AsyncIterator[list[asyncio.Task[int]]]:
    tasks = [asyncio.create_task(read(sender, limits)) for sender in senders]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert limits.room.num_used == 0


def limits_of(num_parts: int, timeout_s: float = TIMEOUT_S) -> BodyLimits:
    return BodyLimits(100 * PART, timeout_s, BodyRoom(num_parts * PART))


async def settled() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


async def test_sixty_long_bodies_take_little_more_than_the_room() -> None:
    limits, most = limits_of(10), 0
    senders = [Sender(50) for _ in range(60)]

    async with reading(senders, limits) as tasks, asyncio.timeout(TIMEOUT_S):
        while not all(task.done() for task in tasks):
            most = max(most, limits.room.num_used)
            await asyncio.sleep(0)
        assert [task.result() for task in tasks] == [50 * PART] * 60
    # The room, and the one body that goes on beyond it.
    assert most <= (10 + 50) * PART


async def test_short_bodies_need_no_room() -> None:
    limits = limits_of(2)
    async with reading([Sender(9, is_slow=True) for _ in range(4)], limits) as slow:
        await settled()
        limits.room.num_used += 100 * PART
        async with asyncio.timeout(TIMEOUT_S):
            assert await read(Sender(1), limits) == PART
        limits.room.num_used -= 100 * PART
        assert not any(task.done() for task in slow)


async def test_who_holds_the_room_without_sending_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_room, "_PATIENCE_S", 0.05)
    limits = limits_of(4)
    slow = [Sender(50, is_slow=True) for _ in range(3)]
    for sender in slow:
        for _ in range(3):
            sender.may_send.release()
    async with reading(slow, limits) as tasks:
        await settled()
        assert limits.room.is_full()
        async with asyncio.timeout(TIMEOUT_S):
            assert await read(Sender(4), limits) == 4 * PART
        ended = [task.exception() for task in tasks if task.done()]
        assert 1 <= len(ended) < len(tasks)
        assert all(isinstance(error, RequestTimeout) for error in ended)


async def test_without_others_a_slow_body_has_all_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_room, "_PATIENCE_S", 0.0)
    limits = limits_of(40)
    sender = Sender(20, is_slow=True)
    async with reading([sender], limits) as [task], asyncio.timeout(TIMEOUT_S):
        for _ in range(20):
            await settled()
            sender.may_send.release()
        assert await task == 20 * PART


@contextlib.asynccontextmanager
async def full(limits: BodyLimits) -> AsyncIterator[None]:
    """Is open while there is no room, and another body is the one that goes on."""
    limits.room.num_used += 100 * PART
    other = Sender(9, is_slow=True)
    other.may_send.release()
    with limits.room.lease() as lease:
        reading = asyncio.create_task(read_json_body(JSON, other.receive, limits, lease))
        await settled()
        yield
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    limits.room.num_used -= 100 * PART


async def test_what_says_that_it_is_long_waits_before_anything_is_read() -> None:
    limits, sender = limits_of(2), Sender(9)
    async with full(limits):
        with limits.room.lease() as lease:
            task = asyncio.create_task(read_json_body(LONG, sender.receive, limits, lease))
            await settled()
            assert sender.num_read == 0
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_who_has_left_does_not_wait() -> None:
    limits = limits_of(2)
    gone = asyncio.get_running_loop().create_future()

    async def receive() -> dict[str, object]:
        assert gone.done()
        return {"type": "http.disconnect"}

    async with full(limits):
        with limits.room.lease(gone) as lease:
            task = asyncio.create_task(read_json_body(LONG, receive, limits, lease))
            await settled()
            gone.set_result(None)
            async with asyncio.timeout(TIMEOUT_S):
                with pytest.raises(ClientDisconnected):
                    await task
