"""A scheduler of data-parallel groups with a fake worker for each, stepped by hand."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.contracts.group_step import GroupOutput, GroupStep
from engine.contracts.messages import EngineCoreOutputs
from engine.contracts.outputs import ModelRunnerOutput
from engine.contracts.request import Request
from engine.sched.groups.group_scheduler import GroupScheduler
from engine.sched.scheduler import Scheduler
from kv_transfer.connectors.no_connector import NoConnectorScheduler
from tests.engine.sched.fake_worker import FakeWorker, PagedMemory, expected_output

NO_STEP = ModelRunnerOutput(-1, [], [], [])


@dataclass(slots=True)
class Answer:
    """Is what one request's client has seen."""

    request: Request
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""


class GroupMachine:
    """Steps all groups; `depth` steps may be out at once."""

    def __init__(
        self, config: EngineConfig, num_blocks: int, num_groups: int = 2, depth: int = 1
    ) -> None:
        self.config = config
        self.depth = depth
        self.answers: dict[str, Answer] = {}
        self.workers = [
            FakeWorker(PagedMemory(num_blocks, config.kv_layout.groups), config.decode_query_len)
            for _ in range(num_groups)
        ]
        self.scheduler = GroupScheduler(
            [Scheduler(config, num_blocks, NoConnectorScheduler()) for _ in range(num_groups)]
        )
        self.in_flight: deque[tuple[GroupStep, GroupOutput]] = deque()

    def add(self, request: Request) -> int:
        """Adds a request. Returns the group that has it."""
        before = [group.stats() for group in self.scheduler.groups]
        names = request.choice_ids or (request.request_id,)
        for name in names:
            expected = expected_output(request, self.config.model.max_model_len)
            self.answers[name] = Answer(request, expected)
        self._take(self.scheduler.add_request(request))
        found = [
            index
            for index, group in enumerate(self.scheduler.groups)
            if group.stats().num_waiting > before[index].num_waiting
        ]
        assert len(found) == 1, "a request is in one group"
        return found[0]

    def abort(self, request_id: str) -> None:
        self._take(self.scheduler.abort_requests([request_id]))

    def step(self) -> GroupStep | None:
        """Schedules a step and runs it; settles the oldest one if `depth` are out."""
        step = self.scheduler.schedule()
        if step is not None:
            outputs = [
                NO_STEP if own is None else worker.execute(own)
                for worker, own in zip(self.workers, step.steps, strict=True)
            ]
            self.in_flight.append((step, GroupOutput(step.step_id, outputs)))
        if len(self.in_flight) >= self.depth or step is None:
            self.settle()
        return step

    def settle(self) -> None:
        if self.in_flight:
            self._take(self.scheduler.update_from_output(*self.in_flight.popleft()))

    def finish(self, max_steps: int = 2000) -> None:
        """Steps until every request has ended, and checks that nothing is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests() and not self.in_flight:
                break
            self.step()
        self.step()  # Rows that ended are taken out.
        while self.in_flight:
            self.settle()
        assert self.scheduler.check_empty() == []

    def _take(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            answer = self.answers[output.request_id]
            assert not answer.finish_reason, "nothing follows the end"
            answer.tokens += output.new_token_ids
            answer.finish_reason = output.finish_reason
