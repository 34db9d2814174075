"""Connections parse in turns: requests that begin come before the rest of long ones."""

from __future__ import annotations

import asyncio
import time

import pytest

from edge.http.connection import parse_turns
from edge.http.connection.parse_turns import ParseTurns

WORK_S = 0.002


class Connection:
    """Has so many pieces to parse, each of `WORK_S`."""

    def __init__(self, turns: ParseTurns, done: list[str], name: str, num_pieces: int) -> None:
        self.turns, self.done, self.name, self.num_pieces = turns, done, name, num_pieces

    def parse_on(self) -> None:
        time.sleep(WORK_S)
        self.done.append(self.name)
        self.num_pieces -= 1
        if self.num_pieces:
            self.turns.wait(self.parse_on, is_first=False)


async def test_a_request_that_begins_waits_for_a_turn_and_not_for_all_long_bodies() -> None:
    turns, done = ParseTurns(), list[str]()
    long_ones = [Connection(turns, done, "long", 50) for _ in range(60)]
    for one in long_ones:
        turns.wait(one.parse_on, is_first=False)
    for _ in range(3):
        await asyncio.sleep(0)
    num_before = len(done)
    assert not turns.may_begin(is_first=False)
    turns.wait(Connection(turns, done, "short", 1).parse_on, is_first=True)
    await asyncio.sleep(0)
    assert done[num_before] == "short"
    assert len(done) > num_before + 1, "the others go on, too"


async def test_a_turn_of_the_event_loop_has_its_bound() -> None:
    turns = ParseTurns()
    assert turns.may_begin(is_first=True)
    turns._until = time.monotonic()
    assert not turns.may_begin(is_first=True)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert turns.may_begin(is_first=True)


async def test_few_connections_are_drained_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse_turns, "_DRAINED_A_TURN", 4)
    turns, drained = ParseTurns(), list[int]()
    for number in range(10):
        turns.drain(lambda number=number: drained.append(number))
    counts = []
    for _ in range(4):
        await asyncio.sleep(0)
        counts.append(len(drained))
    assert counts == [4, 8, 10, 10]
