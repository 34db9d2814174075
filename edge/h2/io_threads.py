"""Threads that do nothing but move bytes between sockets and memory, and check them.

Copying to and from a socket's buffer, and checksums, are most of what a transfer costs, and
Python's lock is free meanwhile: a few threads let one transfer process use more than one core.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

_Job = tuple[asyncio.AbstractEventLoop, Callable[[], object], Callable[[object], None]]


class IoThreads:
    """`num_threads` threads, which begin with the first job; `name` is theirs."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def do(
        self,
        work: Callable[[], T],
        done: Callable[[T], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Lets a thread do the work, which raises nothing. `done` is notified of the result on
        `loop`, from which this must be called."""
        if not self._threads:
            self._start()
        self._jobs.put((loop, work, done))  # type: ignore[arg-type]

    def close(self) -> None:
        """Closes when the jobs that were given are done."""
        for _ in self._threads:
            self._jobs.put(None)
        self._threads.clear()

    def _start(self) -> None:
        self._threads = [
            threading.Thread(target=self._work, name=f"{self._name}-{i}", daemon=True)
            for i in range(self._num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            loop, work, done = job
            result = work()
            del job, work
            # A loop that was closed meanwhile wants to know no more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(done, result)
            del loop, done, result
