"""A timer of the kernel's ends a wait for sockets when it is due, and not at whole milliseconds."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator

import pytest

from edge.http.event_loop.kernel_timer import KernelTimer

LONG_S = 60.0


@pytest.fixture
def timer() -> Iterator[KernelTimer]:
    made = KernelTimer()
    yield made
    made.close()


def wait(timer: KernelTimer, timeout_s: float = LONG_S) -> bool:
    """Returns whether the timer is due within that time."""
    return bool(select.select([timer], [], [], timeout_s)[0])


def test_it_rests_until_it_is_set(timer: KernelTimer) -> None:
    assert not wait(timer, 0)
    assert timer.read() == 0


def test_it_is_never_early(timer: KernelTimer) -> None:
    at = time.monotonic() + 0.0013
    timer.set(at)
    assert wait(timer)
    assert time.monotonic() >= at - 1e-6
    assert timer.read() == 1
    assert not wait(timer, 0)


def test_what_is_past_is_due_at_once(timer: KernelTimer) -> None:
    timer.set(time.monotonic() - 1.0)
    assert wait(timer, 0)


def test_it_is_set_anew_or_stopped(timer: KernelTimer) -> None:
    timer.set(time.monotonic() - 1.0)
    timer.set(time.monotonic() + LONG_S)
    assert not wait(timer, 0)
    timer.set(time.monotonic() - 1.0)
    timer.stop()
    assert not wait(timer, 0)


def test_intervals_are_counted(timer: KernelTimer) -> None:
    timer.set(time.monotonic() - 0.01, interval_s=0.001)
    assert wait(timer)
    assert timer.read() >= 10
