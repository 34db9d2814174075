"""Tests how late an event loop is said to be."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop
from prometheus_client import CollectorRegistry

from edge.http.event_loop.loop_lateness import NAME, LoopLateness


def upto(lateness: LoopLateness, bound: str) -> float:
    return lateness.cumulative()[bound]


def test_ticks_that_are_read_at_once_waited_for_different_times() -> None:
    lateness = LoopLateness(tick_s=0.01)
    lateness.took(1, 0.0002)
    lateness.took(3, 0.0004)  # Those before it were due 10 and 20 ms earlier.
    assert upto(lateness, "0.0001") == 0
    assert upto(lateness, "0.00025") == 1
    assert upto(lateness, "0.0005") == 2
    assert upto(lateness, "0.025") == 4
    assert lateness.total_s == pytest.approx(0.0002 + 0.0004 + 0.0104 + 0.0204)
    lateness.took(100_000, 0.0)
    assert sum(lateness.counts) == 100_004


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_loop_that_is_busy_is_late(run: object) -> None:
    lateness = LoopLateness(tick_s=0.002)

    async def serve() -> None:
        with lateness.watch():
            while not sum(lateness.counts):
                await asyncio.sleep(0.001)
            before = lateness.cumulative()
            asyncio.get_running_loop().call_soon(time.sleep, 0.03)
            while upto(lateness, "+Inf") < before["+Inf"] + 20:
                await asyncio.sleep(0.001)
            beyond = upto(lateness, "+Inf") - upto(lateness, "0.01")
            assert beyond - (before["+Inf"] - before["0.01"]) >= 8
        count = sum(lateness.counts)
        await asyncio.sleep(0.01)
        assert sum(lateness.counts) == count

    run(serve())  # type: ignore[operator]


def test_its_series_is_there_before_the_first_tick() -> None:
    registry, lateness = CollectorRegistry(), LoopLateness()
    registry.register(lateness)
    assert registry.get_sample_value(f"{NAME}_count") == 0
    lateness.took(2, 0.0003)
    assert registry.get_sample_value(f"{NAME}_bucket", {"le": "0.0005"}) == 1
    assert registry.get_sample_value(f"{NAME}_count") == 2
