"""Producer: follows the worker's steps by their marks.

    1. a message says that a step has begun, or has got further
    2. marks are read, and what they say is passed on
    3. marks of a GPU come without messages: they are read again every millisecond, until the
       step is complete

A message that is lost is made up for by the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kv_transfer.metadata import StepProgress
from kv_transfer.producer.layer_marks import LayerMarks

_PAUSE_S = 0.001
_LONG_PAUSE_S = 0.02
_SLOW_AFTER_S = 1.0


class StepWatch:
    """`on_progress` is called for everything new, and of some things twice."""

    def __init__(
        self,
        marks: LayerMarks,
        num_layers: int,
        marks_later: bool,
        on_progress: Callable[[StepProgress], None],
    ) -> None:
        self._marks = marks
        self._num_layers = num_layers
        self._marks_later = marks_later
        self._on_progress = on_progress
        self._newest_step = 0
        self._poller: asyncio.Task[None] | None = None

    def handle(self, message: StepProgress) -> None:
        """Takes word from the worker."""
        self._newest_step = max(self._newest_step, message.step_id)
        if self._look() or not self._marks_later:
            return
        if self._poller is None or self._poller.done():
            self._poller = asyncio.get_running_loop().create_task(self._poll())

    def close(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
        self._marks.close()

    def _look(self) -> bool:
        """Returns whether the newest step is complete."""
        progress = self._marks.progress(self._newest_step)
        if progress is None:
            return False
        self._on_progress(progress)
        complete = (self._newest_step, self._num_layers)
        return (progress.step_id, progress.num_layers_done) >= complete

    async def _poll(self) -> None:
        watched, since = self._newest_step, time.monotonic()
        while not self._look():
            if watched != self._newest_step:
                watched, since = self._newest_step, time.monotonic()
            is_slow = time.monotonic() - since > _SLOW_AFTER_S
            await asyncio.sleep(_LONG_PAUSE_S if is_slow else _PAUSE_S)
