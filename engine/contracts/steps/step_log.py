"""The last steps of an engine, in memory that outlives the engine core.

The node server makes the memory and the engine core writes it, so a report has the last steps also
of a core that was killed or does not answer, and a tool that looks for what holds tokens up can
read half a minute of steps without asking the core. It costs three small stores a step. A number is
written last, so a reader never takes half a record for a step.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec

from host.memory_file import MemoryFile

NUM_STEPS = 4096
_RECORD = struct.Struct("<dddiiiiq")
"""Holds issued at, ended at or 0, worker's host seconds so far or 0, rows, tokens, prompt tokens,
new rows, step number + 1."""
_SECONDS = struct.Struct("<d")
_ENDED_OFFSET = 8
_HOST_OFFSET = 16
_NUMBER = struct.Struct("<q")
_NUMBER_OFFSET = _RECORD.size - _NUMBER.size


class StepRecord(NamedTuple):
    """One step. Times are CLOCK_MONOTONIC seconds; `ended_at` is 0 while workers have it. `rows`
    compute `tokens` in it, `prompt_tokens` of them of prompts; `new_rows` of them were not in the
    step before: prompts that begin, and requests whose KV has come. `worker_host_s`: what the first
    worker's host had spent on starting steps when the result came, since its start."""

    step_id: int
    issued_at: float
    ended_at: float
    worker_host_s: float
    rows: int
    tokens: int
    prompt_tokens: int
    new_rows: int


class StepLogHandle(msgspec.Struct, frozen=True):
    """Lets another process of this host map the memory."""

    pid: int
    fd: int


class StepLog:
    """Records of the last `NUM_STEPS` steps. One writer; anything may read."""

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
        self,
        step_id: int,
        now: float,
        num_rows: int,
        num_tokens: int,
        num_prompt_tokens: int,
        num_new_rows: int,
    ) -> None:
        """Records that workers have been given a step. `now`: CLOCK_MONOTONIC seconds."""
        offset = step_id % NUM_STEPS * _RECORD.size
        counts = num_rows, num_tokens, num_prompt_tokens, num_new_rows
        _NUMBER.pack_into(self._buffer, offset + _NUMBER_OFFSET, 0)
        _RECORD.pack_into(self._buffer, offset, now, 0.0, 0.0, *counts, step_id + 1)

    def retired(self, step_id: int, now: float) -> None:
        """Records that the step's result has come."""
        offset = step_id % NUM_STEPS * _RECORD.size
        _SECONDS.pack_into(self._buffer, offset + _ENDED_OFFSET, now)

    def worked(self, step_id: int, worker_host_s: float) -> None:
        """Records what the worker's host has spent so far, behind the step's result."""
        offset = step_id % NUM_STEPS * _RECORD.size
        _SECONDS.pack_into(self._buffer, offset + _HOST_OFFSET, worker_host_s)

    def steps(self, since: float = 0.0) -> list[StepRecord]:
        """Returns the last steps, the oldest first; none issued before `since`."""
        found = [
            StepRecord(number - 1, issued_at, *rest)
            for issued_at, *rest, number in _RECORD.iter_unpack(self._buffer)
            if number and issued_at >= since
        ]
        return sorted(found, key=lambda step: (step.issued_at, step.step_id))

    def close(self) -> None:
        self._memory.close()


class NoStepLog:
    """Records nothing: nothing can read it."""

    def issued(
        self,
        step_id: int,
        now: float,
        num_rows: int,
        num_tokens: int,
        num_prompt_tokens: int,
        num_new_rows: int,
    ) -> None:
        """Forgets it."""

    def retired(self, step_id: int, now: float) -> None:
        """Forgets it."""
