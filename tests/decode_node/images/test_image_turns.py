"""Requests take turns with their images, and none holds all decoders with slow ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from decode_node.images import image_turns
from decode_node.images.image_turns import ImageLine, ImageTurns


class Request:
    """Has images that go on until they are let end."""

    def __init__(
        self, turns: ImageTurns, done: list[str], name: str, num_images: int, videos: bool = False
    ) -> None:
        self.turns, self.done, self.name = turns, done, name
        self.line = ImageLine(has_videos=videos)
        self.running: list[Callable[[], None]] = []
        self.tasks = [asyncio.create_task(self._image()) for _ in range(num_images)]

    async def _image(self) -> None:
        self.running.append(await self.turns.wait(self.line))
        self.done.append(self.name)

    def end_one(self) -> None:
        self.running.pop(0)()

    def leave(self) -> None:
        for task in self.tasks:
            task.cancel()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_slow_images_leave_a_decoder_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_turns, "_QUICK_S", -1.0)
    turns, begun = ImageTurns(2), list[str]()
    slow = Request(turns, begun, "slow", 16)
    await settled()
    assert begun == ["slow"]
    small = Request(turns, begun, "small", 1)
    await settled()
    assert begun == ["slow", "small"]
    small.end_one()
    slow.end_one()
    await settled()
    assert begun == ["slow", "small", "slow"]
    slow.leave()
    slow.end_one()
    await settled()
    again = Request(turns, begun, "again", 1)
    await settled()
    assert begun[-1] == "again" and turns._num_free == 1
    again.end_one()
    assert turns._num_free == 2


async def test_videos_of_all_requests_leave_a_decoder_to_images() -> None:
    turns, begun = ImageTurns(3), list[str]()
    videos = [Request(turns, begun, "video", 1, videos=True) for _ in range(4)]
    await settled()
    assert begun == ["video"] * 2
    image = Request(turns, begun, "image", 1)
    await settled()
    assert begun[2:] == ["image"]
    image.end_one()
    videos[0].end_one()
    await settled()
    assert begun[3:] == ["video"]
    alone, begun = ImageTurns(1), list[str]()
    Request(alone, begun, "video", 1, videos=True)
    await settled()
    assert begun == ["video"]


async def test_quick_images_have_all_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_turns, "_QUICK_S", 1e9)
    turns, begun = ImageTurns(2), list[str]()
    request = Request(turns, begun, "quick", 4)
    await settled()
    assert len(begun) == 1
    request.end_one()
    await settled()
    assert len(begun) == 3


async def test_lines_take_turns() -> None:
    turns, begun = ImageTurns(1), list[str]()
    first, second = (Request(turns, begun, name, 3) for name in "ab")
    for _ in range(6):
        await settled()
        (first if first.running else second).end_one()
    assert begun == list("ababab")
    assert turns._num_free == 1 and not any(line.waiting for line in turns._lines)
