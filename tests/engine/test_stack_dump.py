"""Stacks of other processes: who writes them, who does not, and nobody is hurt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from host.process_facts import descendants_of, facts_of
from host.stack_dump import dump_stacks

TIMEOUT_S = 60.0
_READY = "print('ready', flush=True)"
_ASLEEP = f"""
import threading, time
from host.stack_dump import install_stack_dumps
install_stack_dumps()
install_stack_dumps()
def waits_in_a_thread(): time.sleep(600)
threading.Thread(target=waits_in_a_thread, daemon=True).start()
{_READY}
def waits_here(): time.sleep(600)
waits_here()
"""
_STRANGER = f"import time\n{_READY}\ntime.sleep(600)"


@contextmanager
def child(source: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline


def state_of(pid: int) -> str:
    facts = facts_of(pid)
    return "" if facts is None else facts.state


def test_each_thread_of_a_process_shows_where_it_is_as_often_as_asked() -> None:
    with child(_ASLEEP) as asleep, child(_STRANGER) as stranger:
        assert {asleep.pid, stranger.pid} <= set(descendants_of(os.getpid()))

        def places() -> list[int]:
            found = dump_stacks([asleep.pid, stranger.pid, 2**22 - 1], TIMEOUT_S)
            assert list(found) == [asleep.pid], "only those that can say"
            stacks = "\n".join(found[asleep.pid])
            return [stacks.count(name) for name in ("waits_in_a_thread", "waits_here")]

        until(lambda: all(places()))
        for _ in range(2):
            assert places() == [1, 1]
        assert stranger.poll() is None
        until(lambda: state_of(asleep.pid) == "S")
        facts = facts_of(asleep.pid)
        assert facts is not None
        assert facts.num_threads == 2 and facts.rss_kib > 0


def test_our_own_stacks_are_read_without_a_signal() -> None:
    """Installing is not needed, and nothing reads frames that other threads change."""
    waits, done = threading.Event(), threading.Event()

    def waits_in_our_thread() -> None:
        waits.set()
        done.wait()

    thread = threading.Thread(target=waits_in_our_thread)
    thread.start()
    waits.wait()
    stacks = "\n".join(dump_stacks([os.getpid()])[os.getpid()])
    done.set()
    thread.join()
    assert stacks.count("waits_in_our_thread") == 1
    assert "test_our_own_stacks" in stacks and stacks.startswith("Thread 0x")


def test_a_stopped_process_is_not_waited_for_long() -> None:
    with child(_ASLEEP) as asleep:
        asleep.send_signal(signal.SIGSTOP)
        until(lambda: state_of(asleep.pid) == "T")
        started = time.monotonic()
        assert dump_stacks([asleep.pid], timeout_s=0.2) == {asleep.pid: []}
        assert time.monotonic() - started < 30
        asleep.send_signal(signal.SIGCONT)
    assert facts_of(asleep.pid) is None
