"""Pieces of an answer are with the connection when `write` returns, and slow clients wait alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest

from edge.http.answers.event_writer import EventWriter, Signs, open_writer

HEAD = {"content-type": "text/event-stream"}
TIMEOUT_S = 60.0


class Connection:
    """An ASGI `send` that takes what comes while `is_ready`, and waits otherwise."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.body = b""
        self.is_over = False
        self._ready = asyncio.Event()
        self._ready.set()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await self._ready.wait()
        if message["type"] == "http.response.start":
            self.starts.append(message["status"])
        else:
            self.body += message["body"]
            self.is_over = not message["more_body"]

    def stop_reading(self) -> None:
        self._ready.clear()

    def read_on(self) -> None:
        self._ready.set()


async def test_a_piece_is_sent_within_the_call_and_the_first_one_sends_the_head() -> None:
    connection = Connection()
    async with open_writer(connection.send, lambda: HEAD, TIMEOUT_S) as writer:
        assert not writer.has_begun and connection.starts == []
        writer.write(b"a\n\n")
        assert (connection.starts, connection.body) == ([200], b"a\n\n")
        writer.write(b"b\n\n")
        assert connection.body == b"a\n\nb\n\n"
        await writer.end(b"c\n\n")
    assert (connection.starts, connection.body) == ([200], b"a\n\nb\n\nc\n\n")
    assert connection.is_over


async def test_an_answer_without_pieces_has_a_head_and_an_end() -> None:
    connection = Connection()
    async with open_writer(connection.send, lambda: HEAD, TIMEOUT_S) as writer:
        await writer.end()
    assert connection.starts == [200] and connection.is_over


async def test_nothing_is_sent_of_an_answer_that_does_not_begin() -> None:
    connection = Connection()
    with pytest.raises(ValueError, match="refused"):
        async with open_writer(connection.send, lambda: HEAD, TIMEOUT_S):
            raise ValueError("refused")
    assert connection.starts == []


@pytest.mark.parametrize("when", ["before the head", "later"])
async def test_a_slow_client_gets_all_in_order_and_holds_nobody_up(when: str) -> None:
    connection = Connection()
    async with open_writer(connection.send, lambda: HEAD, TIMEOUT_S) as writer:
        if when == "later":
            writer.write(b"0")
        connection.stop_reading()
        for i in range(1, 5):
            writer.write(b"%d" % i)
        for _ in range(3):
            await asyncio.sleep(0)
        assert connection.body == (b"0" if when == "later" else b"")
        ending = asyncio.create_task(writer.end(b"!"))
        await asyncio.sleep(0)
        connection.read_on()
        await ending
    assert connection.body == (b"01234!" if when == "later" else b"1234!")
    assert connection.starts == [200]


async def test_a_client_that_reads_again_is_written_to_at_once() -> None:
    connection = Connection()
    async with open_writer(connection.send, lambda: HEAD, TIMEOUT_S) as writer:
        connection.stop_reading()
        writer.write(b"a")
        connection.read_on()
        while connection.body != b"a":
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        writer.write(b"b")
        assert connection.body == b"ab"
        await writer.end()


async def test_who_takes_nothing_is_given_up_in_the_task_that_answers() -> None:
    connection = Connection()
    with pytest.raises(TimeoutError):
        async with open_writer(connection.send, lambda: HEAD, 0.01) as writer:
            connection.stop_reading()
            writer.write(b"a")
            await asyncio.Event().wait()
    assert connection.body == b""


async def test_time_without_anything_to_send_counts_for_nobody() -> None:
    connection = Connection()
    async with open_writer(connection.send, lambda: HEAD, 0.01) as writer:
        writer.write(b"a")
        await asyncio.sleep(0.03)
        await writer.end()
    assert connection.is_over


async def test_what_the_connection_raises_reaches_who_writes() -> None:
    async def send(message: MutableMapping[str, Any]) -> None:
        raise RuntimeError("the answer has ended")

    async with open_writer(send, lambda: HEAD, TIMEOUT_S) as writer:
        with pytest.raises(RuntimeError, match="has ended"):
            writer.write(b"a")


async def test_pieces_go_directly_where_they_can_and_keep_their_order() -> None:
    connection = Connection()
    takes = True

    def directly(data: bytes) -> bool:
        if takes:
            connection.body += b"<%b>" % data
        return takes

    async with open_writer(
        connection.send, lambda: HEAD, TIMEOUT_S, write_directly=directly
    ) as writer:
        writer.write(b"a")
        takes = False
        connection.stop_reading()
        writer.write(b"b")
        takes = True
        writer.write(b"c")
        connection.read_on()
        await until(lambda: connection.body.endswith(b"c"))
        await asyncio.sleep(0)
        writer.write(b"d")
        await writer.end(b"e")
    assert connection.body == b"<a>bc<d>e"


# Signs of life ---------------------------------------------------------------------------------


def silent(writer: EventWriter, seconds: float) -> bool:
    return writer.is_due(writer.sent_at + seconds)


async def test_comments_come_between_pieces_and_only_after_silence() -> None:
    connection = Connection()
    signs = Signs(1.0, b":\n\n")
    async with open_writer(connection.send, lambda: HEAD, TIMEOUT_S, signs) as writer:
        assert not silent(writer, 100.0), "without a head of its own a comment begins nothing"
        writer.write(b"a")
        assert silent(writer, 1.0) and not silent(writer, 0.9)
        await writer.beat()
        connection.stop_reading()
        writer.write(b"b")
        assert not silent(writer, 100.0), "there is something on its way"
        connection.read_on()
        await writer.end(b"c")
        assert not silent(writer, 100.0)
    assert connection.body == b"a:\n\nbc"


async def test_a_comment_may_begin_an_answer() -> None:
    connection, asked = Connection(), 0

    def headers() -> dict[str, str]:
        nonlocal asked
        asked += 1
        return HEAD

    signs = Signs(1.0, b":\n\n", head=HEAD)
    async with open_writer(connection.send, headers, TIMEOUT_S, signs) as writer:
        assert silent(writer, 1.0)
        await writer.beat()
        writer.write(b"a")
        await writer.end()
    assert (connection.starts, connection.body, asked) == ([200], b":\n\na", 0)


async def test_without_an_interval_there_are_none() -> None:
    connection = Connection()
    async with open_writer(connection.send, lambda: HEAD, TIMEOUT_S, Signs(head=HEAD)) as writer:
        assert not silent(writer, 1e6)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0)
