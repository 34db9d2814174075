"""Connects the ledger of adapters with the workers that read them and the requests that want them.

add, remove ──▶ ledger ──commands──▶ workers
answers ◀────── ledger ◀──replies─── workers
                  └──▶ requests whose adapter cannot be read end with an error
"""

from __future__ import annotations

from collections import defaultdict

from engine.contracts.messages import EngineCoreOutputs
from engine.executor.abstract import Executor
from engine.sched.groups.group_scheduler import GroupScheduler
from engine.sched.rows.adapters import AdapterTable, share_ledger
from engine.sched.scheduler import Scheduler


class AdapterSession:
    """Nothing here waits.

    Attributes:
        ledger: Takes calls of the node server, and has their answers.
    """

    def __init__(self, scheduler: Scheduler | GroupScheduler, executor: Executor) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._tables = _tables(scheduler)
        self.ledger = self._tables[0].ledger

    def take_over(self, other: AdapterSession) -> None:
        """Goes on where `other` was, over the same ranks: with what they have, and with calls that
        have no answer yet. No request uses either."""
        for mine, theirs in zip(self._tables, other._tables, strict=True):
            mine.take_slots(theirs)
        self.ledger = other.ledger
        share_ledger(self._tables, self.ledger)

    def send(self) -> None:
        """Sends what the ledger wants of the workers."""
        for command in self.ledger.commands:
            self._executor.adapter(command)
        self.ledger.commands.clear()

    def check(self) -> EngineCoreOutputs:
        """Takes answers of workers, and looks at what is due. Returns the ends of requests."""
        ends: dict[str, str] = {}
        for reply in self._executor.take_adapter_replies():
            ends |= self.ledger.replied(reply.digest, reply.error)
        ends |= self.ledger.check()
        self.send()
        by_error: defaultdict[str, list[str]] = defaultdict(list)
        for request_id, error in ends.items():
            by_error[error].append(request_id)
        outputs = EngineCoreOutputs()
        for error, request_ids in by_error.items():
            outputs.outputs += self._scheduler.abort_requests(request_ids, error).outputs
        return outputs


def _tables(scheduler: Scheduler | GroupScheduler) -> list[AdapterTable]:
    if isinstance(scheduler, GroupScheduler):
        return [group.adapters for group in scheduler.groups]
    return [scheduler.adapters]
