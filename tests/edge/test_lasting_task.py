"""Work that goes on for as long as its service does not end without a word."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from edge.http.answers import heartbeats
from edge.http.answers.heartbeats import Heartbeats
from edge.http.event_loop.lasting_task import start_lasting


async def test_the_log_has_a_failure_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("not foreseen")

    task = start_lasting(fail(), "the watch")
    await asyncio.wait({task})
    await asyncio.sleep(0)
    assert "the watch has failed" in caplog.text and "not foreseen" in caplog.text


async def test_an_end_that_was_asked_for_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    task = start_lasting(asyncio.sleep(60), "the watch")
    await asyncio.sleep(0)
    task.cancel()
    await start_lasting(asyncio.sleep(0), "another")
    assert task.cancelled() and not caplog.text


class Answer:
    """An answer that wants a comment. `error`: what sending one raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sent_at = 0.0
        self.num_sent = 0
        self._error = error

    def is_due(self, now: float) -> bool:
        return True

    async def beat(self) -> None:
        if self._error is not None:
            raise self._error
        self.num_sent += 1


async def test_one_answer_takes_the_pulse_of_no_other(caplog: pytest.LogCaptureFixture) -> None:
    beats, broken = Heartbeats(), Answer(ValueError("not foreseen"))
    others = [Answer() for _ in range(8)]
    with beats.watch(broken):
        for other in others:
            beats._pulses.add(other)
        await beats.beat()
    assert [other.num_sent for other in others] == [1] * 8
    assert "not foreseen" in caplog.text


async def test_comments_on_many_answers_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes out at once: 10,000 took the loop for 0.05 s, in which no stream went on."""
    now = 0.0

    class Slow(Answer):
        async def beat(self) -> None:
            nonlocal now
            now += 0.0002
            await super().beat()

    monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=lambda: now))
    beats, answers = Heartbeats(), [Slow() for _ in range(1000)]
    beats._pulses.update(answers)
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    counting = asyncio.create_task(count_turns())
    await beats.beat()
    counting.cancel()
    assert [one.num_sent for one in answers] == [1] * 1000
    assert num_turns > 50
