"""Waits for the results of steps, in their order, while the worker's own thread starts the next.

    1. `put` hands over the result of a step that was started
    2. the thread waits for it and passes it on
    3. `check` raises what went wrong in 2, in the thread that asks
    4. `close`

On the CPU a result is there as soon as its step was started, and nothing is passed between
threads.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from engine.worker.async_output import AsyncOutput

_CLOSE_TIMEOUT_S = 1.0
"""A device that hangs never gives its results."""


class ResultThread:
    """`finish` is called with each result, one after the other."""

    def __init__(self, finish: Callable[[AsyncOutput], None]) -> None:
        self._finish = finish
        self._outputs: queue.SimpleQueue[AsyncOutput | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def put(self, output: AsyncOutput) -> None:
        """Raises what went wrong with an earlier result."""
        self.check()
        if output.is_ready:
            self._finish(output)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="results", daemon=True)
            self._thread.start()
        self._outputs.put(output)

    def check(self) -> None:
        """Raises what went wrong, if anything did."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Results that are not there yet are dropped with a device that hangs. Idempotent."""
        if self._thread is not None:
            self._outputs.put(None)
            self._thread.join(_CLOSE_TIMEOUT_S)
            self._thread = None

    def _run(self) -> None:
        while (output := self._outputs.get()) is not None:
            try:
                self._finish(output)
            except Exception as error:
                self._error = error
                return
