"""The last steps of an engine, on a page of memory that outlives the engine core.

The node server makes the page and the engine core writes it, so a report has the last steps also of
a core that was killed or does not answer. It costs two small stores a step. A number is written
last, so a reader never takes half a record for a step.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import msgspec

from engine.crash_facts import StepFacts
from host.memory_file import MemoryFile

NUM_STEPS = 64
_RECORD = struct.Struct("<ddiii4xq")
"""Holds issued at, ended at or 0, rows, tokens, prompt tokens, step number + 1."""
_ENDED = struct.Struct("<d")
_ENDED_OFFSET = 8
_NUMBER = struct.Struct("<q")
_NUMBER_OFFSET = _RECORD.size - _NUMBER.size


class StepLogHandle(msgspec.Struct, frozen=True):
    """Lets another process of this host map the page."""

    pid: int
    fd: int


class StepLog:
    """Records of the last `NUM_STEPS` steps. One writer; anybody may read."""

    def __init__(self, memory: MemoryFile) -> None:
        self._memory = memory
        self._buffer = memory.buffer

    @classmethod
    def create(cls, name: str) -> StepLog:
        return cls(MemoryFile.create(name, NUM_STEPS * _RECORD.size))

    @classmethod
    def attach(cls, handle: StepLogHandle) -> StepLog:
        """Raises FileNotFoundError or PermissionError when its maker is gone or not ours."""
        return cls(MemoryFile.attach(handle.pid, handle.fd))

    @property
    def handle(self) -> StepLogHandle:
        return StepLogHandle(self._memory.pid, self._memory.fd)

    def issued(
        self, step_id: int, now: float, num_rows: int, num_tokens: int, num_prompt_tokens: int
    ) -> None:
        """Records that workers have been given a step. `now`: CLOCK_MONOTONIC seconds."""
        offset = step_id % NUM_STEPS * _RECORD.size
        _NUMBER.pack_into(self._buffer, offset + _NUMBER_OFFSET, 0)
        _RECORD.pack_into(
            self._buffer, offset, now, 0.0, num_rows, num_tokens, num_prompt_tokens, step_id + 1
        )

    def retired(self, step_id: int, now: float) -> None:
        """Records that the step's result has come."""
        offset = step_id % NUM_STEPS * _RECORD.size
        _ENDED.pack_into(self._buffer, offset + _ENDED_OFFSET, now)

    def steps(self) -> list[StepFacts]:
        """Returns the last steps, the oldest first."""
        return sorted(self._read(), key=lambda step: step.step_id)

    def _read(self) -> Iterator[StepFacts]:
        now = time.monotonic()
        for place in range(NUM_STEPS):
            issued, ended, rows, tokens, prompt_tokens, number = _RECORD.unpack_from(
                self._buffer, place * _RECORD.size
            )
            if number:
                yield StepFacts(
                    step_id=number - 1,
                    num_rows=rows,
                    num_tokens=tokens,
                    num_prompt_tokens=prompt_tokens,
                    seconds_ago=round(now - issued, 6),
                    seconds=round(ended - issued, 6) if ended else None,
                )

    def close(self) -> None:
        self._memory.close()


class NoStepLog:
    """Records nothing: nobody wants reports."""

    def issued(
        self, step_id: int, now: float, num_rows: int, num_tokens: int, num_prompt_tokens: int
    ) -> None:
        """Forgets it."""

    def retired(self, step_id: int, now: float) -> None:
        """Forgets it."""
