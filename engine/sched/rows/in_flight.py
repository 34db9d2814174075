"""Steps that workers have and whose results are not here yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.contracts.outputs import ModelRunnerOutput
from engine.contracts.request import Request
from engine.contracts.scheduler_output import SchedulerOutput
from engine.contracts.steps.step_log import NoStepLog, StepLog
from engine.contracts.steps.step_work import StepWork
from engine.sched.counters import PrefillRate, SchedulerCounters
from engine.sched.prompts.even_chunks import EvenChunks
from engine.sched.rows.adaptive_drafts import AdaptiveDrafts
from engine.sched.rows.row import Row
from engine.sched.rows.step_slack import StepSlack
from engine.sched.rows.work_meter import WorkMeter
from engine.sched.step_fence import StepFence
from kv_transfer.layout import BlockIds


@dataclass(slots=True)
class PromptChunk:
    """Tokens of one request that a step computes, as a connector reads it."""

    request: Request
    first_token: int
    num_tokens: int
    block_ids: BlockIds


@dataclass(frozen=True, slots=True)
class DraftingStep:
    """The part of a step that the choice of drafts learns from: `num_decodes` rows computed
    `query_len` tokens each."""

    drafts: AdaptiveDrafts
    num_decodes: int
    query_len: int


class StepShape(NamedTuple):
    """Says what a step's time follows from: its rows, and the work of its prompts in tokens that
    begin one; 0: it computes none."""

    num_rows: int
    prompt_work: float


@dataclass(slots=True)
class InFlightStep:
    """A step on its way. `chunks[i]` is a row, and how many of its leading tokens have KV once the
    step is done. `num_tokens`: of all rows, as far as they are known: some drafts may be missing.
    `num_new_rows`: of them, those that enter the workers' tables with it. `num_last_tokens`: tokens
    of prompts that decodes compute, the last of each.
    """

    step_id: int
    issued_at: float
    chunks: list[tuple[Row, int]] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_decodes: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_new_rows: int = 0
    num_idle_decodes: int = 0
    num_last_tokens: int = 0
    work: StepWork | None = None
    drafting: DraftingStep | None = None


class StepsInFlight:
    """All of them, oldest first: each comes back once, in order."""

    def __init__(
        self,
        fence: StepFence,
        counters: SchedulerCounters,
        log: StepLog | NoStepLog,
        slack: StepSlack,
        chunks: EvenChunks | None = None,
    ) -> None:
        """Takes what parts of prompts cost: `chunks`; None: as much as others of as many tokens."""
        self._log = log
        self._chunks = chunks
        self.last_shape = StepShape(0, 0.0)
        self._steps: deque[InFlightStep] = deque()
        self._fence = fence
        self._counters = counters
        self.slack = slack
        self.prefill_rate = PrefillRate()
        self.meter: WorkMeter | None = None

    def issue(self, output: SchedulerOutput, step: InFlightStep) -> None:
        self._steps.append(step)
        self.last_shape = StepShape(step.num_rows, self._prompt_work(output, step))
        self._fence.issue(step.step_id)
        self._log.issued(
            step.step_id,
            step.issued_at,
            step.num_rows,
            step.num_tokens,
            step.num_prompt_tokens,
            step.num_new_rows,
        )

    def retire(
        self, step: SchedulerOutput, output: ModelRunnerOutput, now: float
    ) -> list[tuple[Row, int]]:
        """Takes the oldest step, whose result `output` is. Returns its chunks, which have KV now.

        Raises:
            ValueError: `output` is that of another step.
        """
        due = self._steps[0].step_id if self._steps else None
        if not due == step.step_id == output.step_id:
            raise ValueError(
                f"a result of step {output.step_id} came for step {step.step_id}, due is {due}"
            )
        done = self._steps.popleft()
        self._fence.retire(done.step_id)
        self._log.retired(done.step_id, now)
        seconds = now - max(done.issued_at, self._counters.last_step_at)
        rows = done.num_decodes, done.num_prompt_tokens, done.num_idle_decodes
        self.slack.observe(seconds, *rows)
        if done.num_prompt_tokens or done.work is not None:
            if done.num_prompt_tokens:
                self.prefill_rate.add_step(done.num_prompt_tokens, seconds)
            if done.work is not None and self.meter is not None:
                self.meter.add_step(done.work, seconds)
        if (drafting := done.drafting) is not None:
            _learn(drafting, output, None if done.num_prompt_tokens else seconds)
        num_prompt_tokens = done.num_prompt_tokens + done.num_last_tokens
        self._counters.add_step(num_prompt_tokens, len(output.token_ids), now)
        if output.drafts is not None and output.drafts.counts:
            self._counters.drafts.add_step(output.drafts.counts, output.counts)
        return done.chunks

    def _prompt_work(self, output: SchedulerOutput, step: InFlightStep) -> float:
        if self._chunks is None or not step.num_prompt_tokens:
            return float(step.num_prompt_tokens)
        parts = zip(step.chunks, output.prefill_chunks, strict=True)
        return sum(self._chunks.worth(end - count, count) for (_, end), (_, count) in parts)

    def leftovers(self) -> list[str]:
        return [f"step {step.step_id} in flight" for step in self._steps]


def _learn(drafting: DraftingStep, output: ModelRunnerOutput, seconds: float | None) -> None:
    """Tells the choice of drafts what a step gave, and what it took if it computed nothing else."""
    if seconds is not None and drafting.num_decodes:
        drafting.drafts.step_done(drafting.num_decodes, drafting.query_len, seconds)
    if output.drafts is not None and output.counts:
        drafting.drafts.drafts_checked(output.drafts.counts, output.counts)
