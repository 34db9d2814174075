"""Tests the time limit of sends: what is over at once, what waits, and what waits too long."""

from __future__ import annotations

import asyncio

import pytest

from edge.http.event_loop.limited_wait import within


async def test_work_that_is_over_at_once_lets_nobody_in_between() -> None:
    done: list[str] = []

    async def work() -> None:
        done.append("work")

    asyncio.get_running_loop().call_soon(done.append, "somebody else")
    await within(0.0, work())
    assert done == ["work"]


async def test_work_that_fails_at_once_fails() -> None:
    async def work() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await within(1.0, work())


async def test_work_may_wait_several_times() -> None:
    gates = [asyncio.Event() for _ in range(3)]
    passed: list[int] = []

    async def work() -> None:
        for number, gate in enumerate(gates):
            await gate.wait()
            passed.append(number)

    task = asyncio.create_task(within(60.0, work()))
    for number, gate in enumerate(gates):
        await asyncio.sleep(0)
        assert passed == list(range(number))
        gate.set()
    await task
    assert passed == [0, 1, 2]


async def test_work_that_waits_too_long_is_cancelled() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    with pytest.raises(TimeoutError):
        await within(0.01, work())
    assert ended == ["ended"]


async def test_a_failure_after_a_wait_and_a_cancellation_pass_through() -> None:
    gate, began = asyncio.Event(), asyncio.Event()
    caught: list[str] = []

    async def work() -> None:
        began.set()
        try:
            await gate.wait()
        except asyncio.CancelledError:
            caught.append("cancelled")
            raise
        raise OSError("gone")

    task = asyncio.create_task(within(60.0, work()))
    await began.wait()
    gate.set()
    with pytest.raises(OSError, match="gone"):
        await task
    gate.clear()
    began.clear()
    task = asyncio.create_task(within(60.0, work()))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert caught == ["cancelled"]
