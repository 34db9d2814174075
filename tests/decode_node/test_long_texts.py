"""Very long texts are tokenised one at a time, the shortest first, and not without end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from decode_node.errors import Overloaded
from decode_node.serving.prompts import long_texts
from decode_node.serving.prompts.long_texts import LongTexts
from decode_node.serving.prompts.prompts import VERY_LONG
from tests.decode_node.http_node import http_node

TIMEOUT_S = 30.0


class Book:
    """Is a text whose work goes on until it is let end."""

    def __init__(self, done: list[int], num_chars: int) -> None:
        self.num_chars, self.done = num_chars, done
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def work(self) -> list[int]:
        self.has_begun.set()
        assert self.may_end.wait(TIMEOUT_S)
        self.done.append(self.num_chars)
        return [self.num_chars]


async def begun(book: Book) -> None:
    assert await asyncio.to_thread(book.has_begun.wait, TIMEOUT_S)


async def test_one_at_a_time_and_the_shortest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "_MAX_WAITING", 3)
    texts, done = LongTexts(), list[int]()
    books = [Book(done, num_chars) for num_chars in (50, 40, 30, 20)]
    tasks = [asyncio.create_task(texts.run(book.num_chars, book.work)) for book in books]
    await begun(books[0])
    with pytest.raises(Overloaded):
        await texts.run(10, books[0].work)
    assert not any(book.has_begun.is_set() for book in books[1:])
    for book in books:
        book.may_end.set()
    async with asyncio.timeout(TIMEOUT_S):
        assert await asyncio.gather(*tasks) == [[50], [40], [30], [20]]
    assert done == [50, 20, 30, 40]


async def test_clients_that_leave_block_nobody() -> None:
    texts, done = LongTexts(), list[int]()
    first, waits, last = (Book(done, num_chars) for num_chars in (3, 2, 1))
    working = asyncio.create_task(texts.run(3, first.work))
    await begun(first)
    waiting = asyncio.create_task(texts.run(2, waits.work))
    following = asyncio.create_task(texts.run(1, last.work))
    await asyncio.sleep(0)
    for task in (working, waiting):
        task.cancel()
    await asyncio.gather(working, waiting, return_exceptions=True)
    assert not last.has_begun.is_set(), "a thread cannot be stopped"
    first.may_end.set()
    last.may_end.set()
    async with asyncio.timeout(TIMEOUT_S):
        assert await following == [1]
    assert not waits.has_begun.is_set()


async def test_a_text_that_is_far_too_long_is_refused_before_it_is_tokenised() -> None:
    async with http_node() as node:
        for length, status in (((1 << 20) + 1, 400), (VERY_LONG + 1, 200)):
            answer = await node.client.post("/tokenize", json={"prompt": " " * length})
            assert answer.status_code == status
            if status == 400:
                assert "send it in parts" in answer.json()["error"]["message"]
