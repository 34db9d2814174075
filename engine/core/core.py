"""One engine without its process: scheduler, executor and connector, and the order of a step.

    schedule ──▶ execute_model ──▶ (workers) ──▶ collect ──▶ update_from_output
       ▲                                                            │
       └───────────── when the batch queue has room ◀───────────────┘

The batch queue holds the steps that workers have and that are not updated yet. Its size is the
number of steps in flight: with 1 the scheduler waits for each result, with 2 it decides step N+1
while the workers compute step N, and no earlier than it must (`StepPace`) while a request may come
that step N+1 could take along. Pipeline stages compute a step each, and one more is on its way.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

from edge.program import settle
from engine.config import EngineConfig
from engine.contracts.errors import EngineDeadError
from engine.contracts.group_step import GroupOutput, GroupStep, Step, StepResult
from engine.contracts.messages import (
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    PrefillLocally,
    PrefixAnswer,
    PromptComputed,
    RequestMessage,
    RetryRemotePrefill,
    SupplyCandidates,
    SupplyFirstToken,
)
from engine.contracts.model_identity import identified
from engine.contracts.outputs import ModelRunnerOutput, SchedulerStats
from engine.contracts.reports.crash_facts import EngineFacts
from engine.contracts.request import Request
from engine.contracts.scheduler_output import SchedulerOutput
from engine.contracts.steps.step_log import StepLog
from engine.core.adapter_session import AdapterSession
from engine.core.scheduling import create_scheduling
from engine.core.step_pace import StepPace
from engine.executor.abstract import Executor, KVCaches, ReportProgress
from engine.images.image_limits import NO_ENCODER
from engine.models.step_costs import cost_of
from engine.sched.groups.group_scheduler import GroupScheduler
from engine.sched.prompts.even_chunks import EvenChunks
from engine.sched.rows.work_meter import WorkMeter
from host.life_signs import LifeSigns


def steps_in_flight(config: EngineConfig) -> int:
    """Returns how many steps workers have at most."""
    num_stages = config.parallel.pipeline_parallel_size
    if num_stages > 1:
        return num_stages + 1
    return 2 if config.scheduler.async_scheduling else 1


class EngineCore:
    """Connects the scheduler and the executor. Nothing here waits: every method returns at once."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        report: ReportProgress,
        signs: LifeSigns | None = None,
        step_log: StepLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Loads the model. `executor` belongs to the caller, also when this fails. `signs`: of all
        processes of the engine; None: a frozen transfer process is not noticed. `step_log`: where
        the last steps are noted; None: nowhere. `clock`: gives the seconds by which steps are
        paced."""
        caches = executor.initialize(report)
        self.num_blocks = caches.num_blocks
        self.device_name = caches.device_name
        self._executor = executor
        self._signs, self._step_log, self._clock = signs, step_log, clock
        self._batch_queue: deque[Step] = deque()
        self._results = EngineCoreOutputs()
        """Outputs of what happened since the last step."""
        self._begin(identified(config, caches.model_hash), caches)

    def _begin(self, config: EngineConfig, caches: KVCaches) -> None:
        """Makes what decides in this engine. Raises `EngineDeadError`."""
        self.config = config
        try:
            self.connector, self.scheduler = create_scheduling(
                config, caches, self._signs, self._step_log
            )
        except EngineDeadError:
            # Without its worker no transfer process can start, and none can say why.
            self._executor.collect()
            raise
        if config.inspection.enable_mfu_metrics and (cost := cost_of(config)) is not None:
            self.scheduler.measure(WorkMeter(cost))
        self._even_out(config)
        self.adapters = AdapterSession(self.scheduler, self._executor)
        self._batch_queue_size = steps_in_flight(config)
        self.next_step_at: float | None = None
        """CLOCK_MONOTONIC seconds at which `step` must be called even if nothing happens, as a step
        is held back until then; None: none is."""
        self.pace: StepPace | None = None
        """Holds steps back; None: they go out as soon as there is room for them."""
        scheduler, is_late = self.scheduler, config.device.allows("late-steps")
        if self._batch_queue_size == 2 and is_late and not isinstance(scheduler, GroupScheduler):
            prefill = scheduler.remote.prefill
            self.pace = StepPace(
                lambda: scheduler.last_shape,
                lambda: prefill.num_started > 0,
                lambda: prefill.lacks_token,
            )

    def _even_out(self, config: EngineConfig) -> None:
        """Lets chunks of a prompt take the same time where a stage waits for the next one's."""
        limits = config.scheduler
        has_stages = config.parallel.pipeline_parallel_size > 1
        if isinstance(self.scheduler, GroupScheduler):
            return
        if has_stages and limits.enable_chunked_prefill and (cost := cost_of(config)) is not None:
            self.scheduler.shrink_chunks(EvenChunks(cost, limits.max_num_batched_tokens))

    def handle(self, message: RequestMessage) -> None:
        """Adds, advises on or ends requests. The outputs of those that it ends come out of the next
        `step`.
        """
        scheduler = self.scheduler
        match message:
            case EngineCoreRequest():
                if self.pace is not None:
                    self.pace.request_came(self._clock())
                self._add(scheduler.add_request(Request(message)))
            case AbortRequests(request_ids):
                self._add(scheduler.abort_requests(request_ids))
            case SupplyCandidates(request_id, candidates):
                self._add(scheduler.supply_candidates(request_id, candidates))
            case SupplyFirstToken(request_id, token_id, siblings, feature):
                self._add(scheduler.supply_first_token(request_id, token_id, siblings, feature))
            case PromptComputed(request_id):
                scheduler.prompt_computed(request_id)
            case RetryRemotePrefill(request_id, params):
                self._add(scheduler.retry_remote(request_id, params))
            case PrefixAnswer(request_id, number, params, num_tokens):
                scheduler.remote.peers.answered(request_id, number, params, num_tokens)
            case PrefillLocally(request_id):
                self._add(scheduler.prefill_locally(request_id))

    def step(self) -> EngineCoreOutputs:
        """Takes what has arrived and keeps the batch queue full. Call whenever something
        happened. Raises EngineDeadError."""
        outputs = self._executor.collect()
        ahead_s = self._executor.ahead_s if len(outputs) == 1 else None
        for output in outputs:
            if self.pace is not None:
                self.pace.ended(self._clock(), self._executor.host_s, ahead_s)
            self._add(self._finish_step(output))
            if self._step_log is not None:
                self._step_log.worked(output.step_id, self._executor.host_s)
        self._add(self.adapters.check())
        events = self.connector.get_finished()
        if events is not None:
            self._add(self.scheduler.update_from_connector(events))
            if self.pace is not None and events.finished_recving:
                self.pace.kv_came(self._clock())
        self._fill_batch_queue()
        if stranded := self.scheduler.admission.take_stranded():
            ended = self.scheduler.abort_requests(stranded)
            for end in ended.outputs:
                end.error = NO_ENCODER
            self._add(ended)
        results, self._results = self._results, EngineCoreOutputs()
        results.prefix_asks = self.scheduler.remote.peers.take_asks()
        results.timestamp = time.monotonic()
        return results

    def _add(self, more: EngineCoreOutputs) -> None:
        self._results.outputs.extend(more.outputs)
        self._results.kv_results.extend(more.kv_results)

    def _finish_step(self, output: StepResult) -> EngineCoreOutputs:
        step = self._batch_queue.popleft()
        if output.step_id != step.step_id:
            raise EngineDeadError(
                f"the workers answered step {output.step_id} where step {step.step_id} was due; "
                f"this is a fault of tandem: please report it with the log"
            )
        if isinstance(self.scheduler, GroupScheduler):
            assert isinstance(step, GroupStep) and isinstance(output, GroupOutput)
            return self.scheduler.update_from_output(step, output)
        assert isinstance(step, SchedulerOutput) and isinstance(output, ModelRunnerOutput)
        return self.scheduler.update_from_output(step, output)

    def _fill_batch_queue(self) -> None:
        while len(self._batch_queue) < self._batch_queue_size and not self._holds_step():
            decided_at = self._clock()
            step = self.scheduler.schedule()
            self.adapters.send()
            if step is None:
                return
            self._batch_queue.append(step)
            self._executor.execute_model(step)
            if self.pace is not None:
                self.pace.issued(decided_at, self._clock())

    def _holds_step(self) -> bool:
        """Returns whether the next step waits for who may come; `next_step_at` is set then."""
        now = self._clock()
        issue_at = now if self.pace is None else self.pace.issue_at(now)
        self.next_step_at = issue_at if issue_at > now else None
        return self.next_step_at is not None

    @property
    def is_idle(self) -> bool:
        """Returns whether no request is known and no step is in flight. KV may still be on its way
        out.
        """
        return not self._batch_queue and not self.scheduler.has_unfinished_requests()

    def stats(self) -> SchedulerStats:
        """Returns statistics with what only the executor knows."""
        stats = self.scheduler.stats()
        stats.worker_host_s = self._executor.host_s
        stats.grammar = self._executor.grammar_stats
        stats.experts = self._executor.expert_stats
        stats.num_dropped_messages = self._executor.num_dropped_messages
        stats.num_kernel_compiles, _ = self._executor.late_kernels
        return stats

    def facts(self) -> EngineFacts:
        """Returns what a crash report says of this engine."""
        facts = self.scheduler.facts()
        workers = {pid: f"worker {rank}" for rank, pid in enumerate(self._executor.worker_pids)}
        movers = dict.fromkeys(self.connector.process_pids, "a transfer process")
        facts.names = {os.getpid(): "the engine core", **movers, **workers}
        facts.num_late_kernels, late = self._executor.late_kernels
        facts.late_kernels = list(late)
        return facts

    def check_empty(self) -> None:
        """Checks an idle engine: when no KV is on its way either, nothing may be left of requests
        and transfers that have ended. Raises RuntimeError naming what is."""
        if self.connector.counters.get("live_transfers"):
            return
        left = self.scheduler.check_empty()
        if left:
            raise RuntimeError(f"an idle engine still holds {', '.join(left)}")

    def in_the_way(self) -> list[str]:
        """Names what another role cannot begin beside; empty when nothing is left of this one."""
        transfers = int(self.connector.counters.get("live_transfers", 0))
        left = [f"{transfers} transfers"] if transfers else []
        return left + self.adapters.ledger.leftovers() + self.scheduler.check_empty()

    def hold_steps(self) -> bool:
        """Starts no more steps. Returns whether the last one has ended."""
        self._batch_queue_size = 0
        return not self._batch_queue

    def switch_role(self, config: EngineConfig) -> None:
        """Becomes the engine of `config`, of which workers have everything already: their weights,
        KV cache and graphs stay. What is left of requests and transfers is given up. Needs that no
        step is in flight. Raises `EngineDeadError`, `KVTransferError`: then nothing goes on."""
        before = self.adapters
        self.connector.shutdown()
        self._begin(config, self._executor.switch_role(config))
        self.adapters.take_over(before)
        settle()  # The former role's objects are in cycles; no step waits now.

    def shutdown(self) -> None:
        """Ends all transfers. Idempotent."""
        self.connector.shutdown()
