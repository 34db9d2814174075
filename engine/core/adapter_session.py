"""Adapters that come and go while an engine runs, over all its ranks.

    add      known ──▶ read by all ranks ──▶ answered; or refused by one, and forgotten
    remove   takes no more requests ──▶ the last one has ended ──▶ forgotten, answered

Also sends what the scheduler wants of the workers' host memory, in order with the steps, and hears
their answers: requests whose adapter cannot be read end with an error.
"""

from __future__ import annotations

from collections import defaultdict

from engine.contracts.messages import AdapterAnswer, EngineCoreOutput, EngineCoreOutputs
from engine.executor.abstract import Executor
from engine.sched.groups.group_scheduler import GroupScheduler
from engine.sched.scheduler import Scheduler


class AdapterSession:
    """Answers calls of the node server. Nothing here waits."""

    def __init__(
        self, scheduler: Scheduler | GroupScheduler, executor: Executor, num_ranks: int
    ) -> None:
        self._scheduler = scheduler
        self._adapters = scheduler.adapters
        self._executor = executor
        self._num_ranks = num_ranks
        self._heard: defaultdict[str, list[str]] = defaultdict(list)
        """Keeps what ranks have answered about an adapter that they load: an error, or nothing."""
        self._adding: defaultdict[str, list[int]] = defaultdict(list)
        self._removing: defaultdict[str, list[int]] = defaultdict(list)
        self._answers: list[AdapterAnswer] = []

    def take_over(self, other: AdapterSession) -> None:
        """Goes on where `other` was, over the same ranks: with what they have, and with calls that
        have no answer yet. No request uses either."""
        self._adapters.take_over(other._adapters)
        self._heard, self._answers = other._heard, other._answers
        self._adding, self._removing = other._adding, other._removing

    def add(self, call_id: int, digest: str, path: str) -> None:
        """Makes an adapter known; the answer comes when all ranks have read it. If host memory is
        full of adapters in use, it is read when it is wanted."""
        self._adapters.add(digest, path)
        is_here = self._adapters.load(digest)
        self.send()
        if is_here or not self._adapters.is_loading(digest):
            self._answers.append(AdapterAnswer(call_id))
        else:
            self._adding[digest].append(call_id)

    def remove(self, call_id: int, digest: str) -> None:
        """Takes an adapter out of use; the answer comes when it is gone."""
        self._adapters.remove(digest)
        self._removing[digest].append(call_id)

    def send(self) -> None:
        """Sends what the scheduler wants of the workers."""
        for command in self._adapters.commands:
            self._executor.adapter(command)
        self._adapters.commands.clear()

    def check(self) -> EngineCoreOutputs:
        """Takes answers of workers, and forgets adapters that nobody wants any more. Returns the
        ends of requests."""
        ends = EngineCoreOutputs()
        for reply in self._executor.take_adapter_replies():
            heard = self._heard[reply.digest]
            heard.append(reply.error)
            if len(heard) == self._num_ranks:
                del self._heard[reply.digest]
                ends.outputs += self._loaded(reply.digest, next(filter(None, heard), ""))
        for digest in self._adapters.forget_leaving():
            self._answer(self._removing.pop(digest, []))
        self.send()
        return ends

    def leftovers(self) -> list[str]:
        """Names the calls that have no answer yet."""
        open_calls = {*self._heard, *self._adding, *self._removing}
        return [f"adapter {digest[:12]} on its way" for digest in sorted(open_calls)]

    def take_answers(self) -> list[AdapterAnswer]:
        """Returns the answers since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def _loaded(self, digest: str, error: str) -> list[EngineCoreOutput]:
        self._adapters.loaded(digest, error)
        self._answer(self._adding.pop(digest, []), error)
        if not error:
            return []
        self._answer(self._removing.pop(digest, []))
        ids = self._adapters.requests_of(digest)
        return self._scheduler.abort_requests(ids, error).outputs

    def _answer(self, calls: list[int], error: str = "") -> None:
        self._answers += [AdapterAnswer(call_id, error) for call_id in calls]
