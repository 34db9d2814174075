"""Each turn of an event loop has one piece of work on requests, and reads what came in between."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from edge.http.long_work import pause


class Turns:
    """Counts the turns of the running loop while it is open."""

    def __init__(self) -> None:
        self.number = 0
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_soon(self._next)

    def _next(self) -> None:
        self.number += 1
        self._handle = self._loop.call_soon(self._next)

    def close(self) -> None:
        self._handle.cancel()


async def test_pieces_of_many_requests_take_turns() -> None:
    turns, at = Turns(), list[tuple[int, int]]()

    async def request(number: int) -> None:
        for _ in range(3):
            await pause()
            at.append((turns.number, number))

    await asyncio.gather(*map(request, range(5)))
    turns.close()
    assert len(at) == 15
    assert max(Counter(turn for turn, _ in at).values()) == 1
    # In the order in which they asked.
    assert [number for _, number in at] == [*range(5)] * 3


async def test_one_alone_waits_for_one_turn() -> None:
    turns = Turns()
    for expected in (1, 2, 3):
        await pause()
        assert turns.number <= expected
    turns.close()


@pytest.mark.parametrize("cancelled", range(4))
async def test_a_request_that_ends_meanwhile_leaves_its_turn_to_others(cancelled: int) -> None:
    done = []

    async def request(number: int) -> None:
        await pause()
        done.append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[cancelled].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [number for number in range(4) if number != cancelled]
    await asyncio.wait_for(pause(), 10)


async def test_a_request_that_ends_in_the_moment_of_its_turn_leaves_it_to_others() -> None:
    done = []

    async def request(number: int) -> None:
        await pause()
        done.append(number)
        if number == 0:
            tasks[1].cancel()  # Its turn is the next one already.

    tasks = [asyncio.create_task(request(number)) for number in range(3)]
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [0, 2]
    await asyncio.wait_for(pause(), 10)


def test_each_loop_has_turns_of_its_own() -> None:
    """One that was left in the midst of a turn holds up no other."""

    async def leave() -> None:
        tasks = [asyncio.create_task(pause()) for _ in range(2)]
        await asyncio.wait(tasks, timeout=0)

    asyncio.run(leave())
    asyncio.run(asyncio.wait_for(pause(), 10))
