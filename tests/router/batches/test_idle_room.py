"""Requests of batches wait for room, and the log says when there is none for long."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import pytest

from router.batches.runs import idle_room
from router.batches.runs.idle_room import IdleRoom


@dataclass
class Nodes:
    """Are nodes that have room for `room` requests."""

    room: int = 0
    window_s: float = 10.0
    num_looks: int = 0

    def look(self) -> None:
        self.num_looks += 1

    def free_tokens(self, model: str) -> int:
        return 1000

    def num_rooms(self, model: str) -> int:
        return self.room


async def test_batches_that_stand_are_in_the_log_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(idle_room, "_LONG_S", 0.0)
    monkeypatch.setattr(idle_room, "_PAUSE_S", 0.0)
    nodes = Nodes()
    room = IdleRoom(nodes, 4)  # type: ignore[arg-type]
    running = asyncio.create_task(room.run())
    entering = asyncio.create_task(room.enter("m", 10))
    with caplog.at_level(logging.WARNING):
        while nodes.num_looks < 10:
            await asyncio.sleep(0)
    assert len(caplog.messages) == 1 and "--itl-objective-ms" in caplog.messages[0]
    nodes.room = 1
    await entering
    room.leave("m")
    running.cancel()
