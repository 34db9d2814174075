"""However it ends, nothing is left running."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from kv_transfer.consumer.joint_tasks import all_or_none


class Part:
    """Ends when it is told to; `is_over` then, or when it was cancelled."""

    def __init__(self) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_over = False

    async def run(self) -> None:
        try:
            await self.end
        finally:
            await asyncio.sleep(0)  # It takes a moment to stop.
            self.is_over = True


async def breathe() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_it_returns_when_all_have_ended() -> None:
    parts, guard = [Part(), Part()], Part()
    task = asyncio.create_task(all_or_none([part.run() for part in parts], guard.run()))
    for part in parts:
        await breathe()
        assert not task.done()
        part.end.set_result(None)
    await task
    assert guard.is_over
    await all_or_none([])


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_the_first_error_ends_all(failing: int) -> None:
    parts = [Part(), Part(), Part()]
    *some, guard = parts
    task = asyncio.create_task(all_or_none([part.run() for part in some], guard.run()))
    await breathe()
    parts[failing].end.set_exception(ValueError("no more"))
    with pytest.raises(ValueError, match="no more"):
        await task
    assert all(part.is_over for part in parts)


async def test_cancelled_it_ends_all_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    parts = [Part(), Part()]
    task = asyncio.create_task(all_or_none([parts[0].run()], parts[1].run()))
    await breathe()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(part.is_over for part in parts)
    del task
    await breathe()
    assert not caplog.records


@pytest.mark.parametrize("fails_first", [False, True])
async def test_cancelled_once_more_it_still_waits_for_all(fails_first: bool) -> None:
    """A part stops when a thread is done with its memory, whoever cancels it how often."""
    may_stop = asyncio.Event()
    other, has_stopped = Part(), False

    async def stops_late() -> None:
        nonlocal has_stopped
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            while not may_stop.is_set():
                with suppress(asyncio.CancelledError):
                    await may_stop.wait()
            has_stopped = True

    task = asyncio.create_task(all_or_none([other.run(), all_or_none([stops_late()])]))
    await breathe()
    if fails_first:
        other.end.set_exception(ValueError("no more"))
    else:
        task.cancel()
    await breathe()
    try:
        for _ in range(2):
            task.cancel()
            await breathe()
            assert not task.done()
    finally:
        may_stop.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert has_stopped
