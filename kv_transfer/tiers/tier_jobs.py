"""Keeps the jobs of the tiers, each sent to all transfer processes, and what these have answered.

begin ──▶ sent ── all have answered, or are gone ──▶ `conclude` is called, once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kv_transfer.tier import (
    FetchMeta,
    HostTierEvent,
    LoadBegun,
    LoadMeta,
    LoadTicket,
    PutMeta,
    SpillMeta,
    TierCommand,
    TierJob,
)
from kv_transfer.tiers.tier_task import TierTask

Send = Callable[[int, TierCommand], bool]
"""Tells a transfer process, by number; False: it is down, and will not answer."""


class TierJobs:
    """`conclude` gets a job's number and what has become of it."""

    def __init__(
        self, num_processes: int, send: Send, conclude: Callable[[int, TierTask], None]
    ) -> None:
        self._num_processes = num_processes
        self._send = send
        self._conclude = conclude
        self._jobs: dict[int, TierTask] = {}
        self._begun: list[int] = []
        self._last = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def new_number(self) -> int:
        self._last += 1
        return self._last

    def begin(self, command: TierJob, names: list[bytes], load: LoadMeta | None = None) -> None:
        every_process = set(range(self._num_processes))
        job = TierTask(command, names, every_process, load=load)
        if isinstance(command, LoadMeta) and command.ticket is not None:
            job.unbegun = set(every_process)
        self._jobs[command.job] = job
        for process in range(self._num_processes):
            if not self._send(process, command):
                job.is_lost = True
                job.unanswered.discard(process)
        self._check(command.job, job)

    def answered(self, event: HostTierEvent) -> None:
        job = self._jobs.get(event.job)
        if job is None or event.process not in job.unanswered:
            return
        job.unanswered.discard(event.process)
        job.damaged.update(slot for slot in event.damaged if slot in job.command.slots)
        self._check(event.job, job)

    def load_begun(self, event: LoadBegun) -> None:
        job = self._jobs.get(event.job)
        if job is not None and event.process in job.unbegun:
            job.unbegun.discard(event.process)
            if not job.unbegun:
                self._begun.append(event.job)

    def process_is_gone(self, process: int) -> None:
        for number, job in list(self._jobs.items()):
            job.is_lost = True
            job.unanswered.discard(process)
            self._check(number, job)

    def forget_stored(self) -> None:
        """Makes what jobs write count for nothing."""
        for job in self._jobs.values():
            job.is_lost = job.is_lost or not isinstance(job.command, LoadMeta)

    def _check(self, number: int, job: TierTask) -> None:
        if not job.unanswered:
            del self._jobs[number]
            self._conclude(number, job)

    # What is asked of them --------------------------------------------------------------------

    def take_begun(self) -> list[int]:
        """Returns loads whose first layers are in the blocks, of all processes."""
        begun, self._begun = self._begun, []
        return [job for job in begun if job in self._jobs]

    def ticket(self, number: int) -> LoadTicket | None:
        command = self._jobs[number].command if number in self._jobs else None
        return command.ticket if isinstance(command, LoadMeta) else None

    def give_up(self, numbers: Sequence[int]) -> bool:
        """Gives up fetches, so that nothing is loaded after them. Returns False, and changes
        nothing, if one of these is no fetch (any more)."""
        tasks = [self._jobs[number] for number in numbers if number in self._jobs]
        fetches = [task for task in tasks if isinstance(task.command, FetchMeta)]
        if len(fetches) < len(numbers):
            return False
        for task in fetches:
            task.is_given_up = True
        return True

    def leftovers(self) -> list[str]:
        return [
            f"job {number} of the host tier"
            for number, job in self._jobs.items()
            if not isinstance(job.command, SpillMeta | PutMeta)
        ]
