"""Work that many ask for is done once for those who ask together, and always after they asked."""

from __future__ import annotations

import asyncio

import pytest

from edge.http.event_loop.shared_work import SharedWork


async def test_those_who_ask_together_share_what_is_made_after_they_asked() -> None:
    made: list[int] = []

    async def make() -> int:
        made.append(len(made))
        return len(made)

    work = SharedWork(make)
    assert await asyncio.gather(*(work.get() for _ in range(50))) == [1] * 50
    assert await work.get() == 2


async def test_it_leaves_most_of_the_time_to_others() -> None:
    async def make() -> None:
        await asyncio.sleep(0.01)

    work = SharedWork(make)
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    for _ in range(3):
        await work.get()
    # Three times, with two rests of four times as long.
    assert loop.time() - began_at >= 3 * 0.01 + 2 * 0.04


async def test_a_failure_is_for_those_who_asked() -> None:
    faults = [ValueError("no")]

    async def make() -> str:
        if faults:
            raise faults.pop()
        return "well"

    work = SharedWork(make)
    with pytest.raises(ValueError, match="no"):
        await work.get()
    assert await work.get() == "well"


async def test_who_leaves_takes_nothing_from_others() -> None:
    async def make() -> str:
        return "well"

    work = SharedWork(make)
    leaves, stays = asyncio.create_task(work.get()), asyncio.create_task(work.get())
    await asyncio.sleep(0)
    leaves.cancel()
    assert await stays == "well"
