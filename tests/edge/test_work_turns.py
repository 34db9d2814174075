"""Each turn of an event loop has one piece of work on requests, and reads what came in between."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from edge.http.event_loop.long_work import hold, pause, release


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


async def test_a_long_line_has_several_pieces_a_turn() -> None:
    """Turns of a busy loop are long: what is to be refused would wait for minutes."""
    turns, at = Turns(), list[int]()

    async def request() -> None:
        await pause()
        at.append(turns.number)

    await asyncio.gather(*(request() for _ in range(2000)))
    turns.close()
    in_turn = Counter(at)
    assert max(in_turn.values()) == 16, "a turn stays short"
    assert turns.number < 500
    last = [in_turn[turn] for turn in sorted(in_turn)[-20:]]
    assert last == [1] * 20, "few have a turn each"


async def test_what_is_begun_goes_before_what_has_just_come() -> None:
    order = list[int]()

    async def piece(number: int, *, is_begun: bool) -> None:
        await pause(is_begun=is_begun)
        order.append(number)

    tasks = [asyncio.create_task(piece(i, is_begun=i % 4 == 3)) for i in range(12)]
    await asyncio.gather(*tasks)
    assert order == [0, 3, 7, 11, 1, 2, 4, 5, 6, 8, 9, 10], "0 had its turn at once"


async def test_of_several_pieces_of_a_turn_one_may_end_in_its_moment() -> None:
    done = list[int]()

    async def request(number: int) -> None:
        await pause()
        done.append(number)
        if number == 0:
            for task in tasks[1:4]:
                task.cancel()  # Their turn is the next one already, and they are all of it.

    tasks = [asyncio.create_task(request(number)) for number in range(100)]
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [0, *range(4, 100)]
    await asyncio.wait_for(pause(), 60)


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
    await asyncio.wait_for(pause(), 60)


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
    await asyncio.wait_for(pause(), 60)


async def test_no_piece_begins_while_tokens_are_passed_on() -> None:
    turns, at = Turns(), list[int]()

    async def request() -> None:
        for _ in range(2):
            await pause()
            at.append(turns.number)

    tasks = [asyncio.create_task(request()) for _ in range(3)]
    await asyncio.sleep(0)
    hold()
    hold()
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(at) <= 1, "at most the one whose turn it was"
    held_until = turns.number
    release()
    await asyncio.gather(*tasks)
    turns.close()
    assert len(at) == 6
    assert all(turn >= held_until for turn in at[1:])
    assert max(Counter(at).values()) == 1


async def test_one_piece_gets_in_where_tokens_are_held_again_at_once() -> None:
    done = []

    async def request(number: int) -> None:
        await pause()
        done.append(number)

    hold()
    tasks = [asyncio.create_task(request(number)) for number in range(3)]
    for expected in (0, 1, 2, 3):
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(done) == expected
        release()
        hold()
    release()
    await asyncio.gather(*tasks)


async def test_a_request_that_ends_while_tokens_are_passed_on_takes_no_turn() -> None:
    hold()
    tasks = [asyncio.create_task(pause()) for _ in range(2)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    release()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert tasks[0].cancelled()
    await asyncio.wait_for(pause(), 60)


def test_each_loop_has_turns_of_its_own() -> None:
    """One that was left in the midst of a turn holds up no other."""

    async def leave() -> None:
        tasks = [asyncio.create_task(pause()) for _ in range(2)]
        await asyncio.wait(tasks, timeout=0)

    asyncio.run(leave())
    asyncio.run(asyncio.wait_for(pause(), 60))
