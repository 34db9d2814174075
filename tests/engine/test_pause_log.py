"""Tests pauses of a process: what another reader of the same memory sees."""

from __future__ import annotations

import gc
import time

import pytest

from host import pause_log
from host.pause_log import NUM_PAUSES, PauseKind, PauseLog


def test_the_newest_pauses_are_read_from_the_same_memory() -> None:
    log = PauseLog.create("pauses")
    reader = PauseLog.attach(log.handle)
    assert reader.pauses() == []
    for number in range(NUM_PAUSES + 2):
        log.add(PauseKind.TURN, 100.0 + number, 0.25, number)
    pauses = reader.pauses()
    assert [pause.detail for pause in pauses] == list(range(2, NUM_PAUSES + 2))
    assert pauses[0] == (102.0, 0.25, PauseKind.TURN, 2)
    assert len(reader.pauses(since=100.0 + NUM_PAUSES)) == 1
    reader.close()
    log.close()


def test_a_collection_of_garbage_is_a_pause_while_it_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pause_log, "LEAST_GARBAGE_S", 0.0)
    log = PauseLog.create("pauses")
    gc.collect()
    assert log.pauses() == []
    log.watch_garbage()
    before = time.monotonic()
    gc.collect(1)
    [pause] = [one for one in log.pauses() if one.detail == 1]
    assert pause.kind is PauseKind.GARBAGE
    assert before <= pause.ended_at - pause.seconds <= pause.ended_at <= time.monotonic()
    log.close()
    assert not any(getattr(call, "__self__", None) is log for call in gc.callbacks)
