"""Signs of life: who is silent, for how long, and when silence means nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from host import life_signs
from host.life_signs import LifeSign, LifeSigns, LifeThread, LifeWatch, Silence

TIMEOUT_S = 30.0


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(life_signs, "time", clock)
    return clock


def ask(watch: LifeWatch, clock: Clock, seconds: float) -> Silence:
    """Asks often, for so long."""
    for _ in range(int(seconds * 4)):
        clock.now += 0.25
        found = watch.longest()
    return found


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_longest_silence_is_named(clock: Clock) -> None:
    signs = LifeSigns.create("test-life", 3)
    watch = LifeWatch(signs, {0: "core", 1: "worker 0", 2: "worker 1"})
    assert ask(watch, clock, 5.0) == Silence(), "nobody has begun"
    signs.give(0)
    signs.give(1)
    assert ask(watch, clock, 2.0) == Silence("core", 2.0)
    signs.give(0)
    assert ask(watch, clock, 1.0) == Silence("worker 0", 3.0)
    signs.forget(1)
    assert ask(watch, clock, 1.0) == Silence("core", 2.0)


def test_time_in_which_the_watcher_stood_still_counts_for_nobody(clock: Clock) -> None:
    signs = LifeSigns.create("test-life", 1)
    watch = LifeWatch(signs, {0: "core"})
    signs.give(0)
    ask(watch, clock, 0.5)
    clock.now += 60.0
    assert watch.longest().seconds == 0.0
    assert ask(watch, clock, 2.0) == Silence("core", 2.0), "but it is silent still"


def test_signs_survive_the_wrap_of_their_words(clock: Clock) -> None:
    clock.now = 2**32 / 1000 - 0.5
    signs = LifeSigns.create("test-life", 1)
    signs.give(0)
    clock.now += 1.0
    assert signs.silent_s(0) == pytest.approx(1.0, abs=0.01)


def test_other_processes_give_signs_at_their_places() -> None:
    signs = LifeSigns.create("test-life", 4)
    handle = signs.part(1).handle(2)
    code = (
        "from host.life_signs import LifeSign, LifeSignHandle;"
        f"LifeSign.attach(LifeSignHandle(pid={handle.pid}, fd={handle.fd}, place={handle.place}))"
        ".give()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    found = [signs.silent_s(place) for place in range(4)]
    assert found[:3] == [None] * 3
    assert found[3] is not None and found[3] < TIMEOUT_S
    assert signs.part(1).silent_s(2) is not None
    attached = LifeSigns.attach(handle)
    attached.forget(0)
    assert signs.silent_s(3) is None


def test_a_thread_gives_signs_while_others_compute() -> None:
    signs = LifeSigns.create("test-life", 1)
    given = threading.Semaphore(0)
    sign = LifeSign.attach(signs.handle(0))

    def give() -> None:
        sign.give()
        given.release()

    thread = LifeThread(give)
    for _ in range(3):
        assert given.acquire(timeout=TIMEOUT_S)
    thread.close()
    thread.close()
    signs.forget(0)
    assert not given.acquire(timeout=0), "nothing comes after its end"
    assert signs.silent_s(0) is None
