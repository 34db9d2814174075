"""Tells what an engine did in its last steps, and what held its processes up meanwhile.

    1. made with the engine core, which notes its steps, and its own pauses, in shared memory
    2. `report`: the first one begins the watch of this process's event loop and garbage
    3. `close`

Nothing is asked for a report: it reads the memory, also that of a core that is busy or dead.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

import msgspec

from engine.contracts.steps.step_log import NUM_STEPS, StepLog, StepRecord
from engine.frontend.output_delivery import Delivered
from host.pause_log import Pause, PauseKind, PauseLog

LOOP_INTERVAL_S = 0.01
LEAST_LAG_S = 0.003
"""uvloop keeps time in milliseconds: what is shorter says nothing."""


class PauseReport(msgspec.Struct, frozen=True):
    """A pause as reports tell it. `ended_at`: CLOCK_MONOTONIC seconds; `detail`: of a collection
    its generation."""

    process: str
    kind: str
    ended_at: float
    seconds: float
    detail: int


class HistoryReport(msgspec.Struct, frozen=True):
    """Holds what is reported. `now`: CLOCK_MONOTONIC seconds of this host, as all times here. A
    step is [number, issued at, ended at (0: it goes on), the worker's host seconds so far, rows,
    tokens, prompt tokens, new rows]; a message of outputs on its way is [sent at, received at,
    written at]."""

    now: float
    steps: list[StepRecord]
    pauses: list[PauseReport]
    deliveries: list[Delivered] = []


class StepHistory:
    """Reads what the engine core notes, and watches the node server. Made and closed in its event
    loop."""

    def __init__(self, engine_id: str) -> None:
        self.steps = StepLog.create(f"tandem-{engine_id}-steps")
        self.core_pauses = PauseLog.create(f"tandem-{engine_id}-pauses")
        self._own_pauses = PauseLog.create(f"tandem-{engine_id}-server")
        self._watching: asyncio.Task[None] | None = None
        self._deliveries: deque[Delivered] = deque(maxlen=NUM_STEPS)

    def delivered(self, delivered: Delivered) -> None:
        """Notes that the outputs of one message are on their way to clients."""
        self._deliveries.append(delivered)

    def report(self, since: float = 0.0) -> HistoryReport:
        """Returns the steps that were issued, and the pauses that ended, after `since`."""
        if self._watching is None:
            self._own_pauses.watch_garbage()
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        told = [_report("engine core", pause) for pause in self.core_pauses.pauses(since)]
        told += [_report("node server", pause) for pause in self._own_pauses.pauses(since)]
        deliveries = [one for one in self._deliveries if one.sent_at > since]
        return HistoryReport(time.monotonic(), self.steps.steps(since), told, deliveries)

    async def _watch(self) -> None:
        while True:
            slept_from = time.monotonic()
            await asyncio.sleep(LOOP_INTERVAL_S)
            now = time.monotonic()
            if (late_s := now - slept_from - LOOP_INTERVAL_S) >= LEAST_LAG_S:
                self._own_pauses.add(PauseKind.EVENT_LOOP, now, late_s)

    def close(self) -> None:
        """Gives the memory back. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
        for log in (self.steps, self.core_pauses, self._own_pauses):
            log.close()


def _report(process: str, pause: Pause) -> PauseReport:
    name = pause.kind.name.lower()
    return PauseReport(process, name, pause.ended_at, pause.seconds, pause.detail)
