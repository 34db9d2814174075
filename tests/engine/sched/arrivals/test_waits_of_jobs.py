"""Waits for a tier count the time that this process ran, not what it stood still."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from engine.sched.arrivals import host_source, store_source, tier_source
from engine.sched.arrivals.tier_source import ArrivalsByJob
from host.life_signs import SIGN_INTERVAL_S


@dataclass(eq=False)
class Waiting:
    job: int = -1
    began_at: float = 0.0
    waited_s: float = 0.0


@pytest.mark.parametrize(
    "limit_s",
    [store_source._ASK_LIMIT_S, store_source._READ_LIMIT_S, host_source._READ_LIMIT_S],
)
def test_a_standstill_alone_ends_no_wait(monkeypatch: pytest.MonkeyPatch, limit_s: float) -> None:
    now = 100.0
    monkeypatch.setattr(tier_source, "time", SimpleNamespace(monotonic=lambda: now))
    asked: ArrivalsByJob[Any] = ArrivalsByJob("question")
    arrival = Waiting()
    asked.add(arrival, 1)
    now += 3600.0
    assert asked.overdue(limit_s) == []
    waited_s = 0.0
    while not asked.overdue(limit_s):
        now += SIGN_INTERVAL_S
        waited_s += SIGN_INTERVAL_S
        assert waited_s <= limit_s + SIGN_INTERVAL_S, "an idle engine looks as often as that"
    assert asked.overdue(limit_s) == [arrival]
