"""Decides, step by step, which request computes how many tokens and where its KV goes.

One step:

    1. `schedule`            running requests that decode first; then prompts, under way or waiting,
                             in their order, while budget, rows and blocks last
    2. the workers run it    a second step may be scheduled meanwhile
    3. `update_from_output`  sampled tokens are confirmed; ends are found; blocks that are full
                             and certain enter the prefix cache

Between steps the node server adds, aborts and advises, and the connector reports. The scheduler
never needs a result to schedule the next step: it plans by what a decoding row may have at most,
and rows that turn out to have ended are taken out one step late. Results name (row, epoch, step)
and their number of tokens; what a row computed behind its end is dropped. A result may also name
requests that cannot go on: each ends with an error. Blocks that were given up wait until each step
that could write them has retired (`StepFence`). What may end anything returns `EngineCoreOutputs`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from engine.config import EngineConfig
from engine.contracts.messages import EngineCoreOutput, EngineCoreOutputs
from engine.contracts.outputs import ModelRunnerOutput, SchedulerStats, TokenLogprobs
from engine.contracts.reports.crash_facts import EngineFacts
from engine.contracts.request import Request, RequestStatus
from engine.contracts.scheduler_output import SchedulerOutput
from engine.contracts.steps.step_launches import StepLaunches
from engine.contracts.steps.step_log import NoStepLog, StepLog
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.admission import Admission
from engine.sched.choices.choices import Choices
from engine.sched.choices.forks import Forks
from engine.sched.counters import SchedulerCounters
from engine.sched.prompt_steps import PromptSteps
from engine.sched.prompts.even_chunks import EvenChunks
from engine.sched.prompts.prompt_order import MANY_PROMPTS, PromptOrder
from engine.sched.remote_kv import RemoteKV
from engine.sched.request_limits import RequestLimits
from engine.sched.request_table import RequestTable
from engine.sched.rows.adapters import AdapterTable
from engine.sched.rows.in_flight import StepShape, StepsInFlight
from engine.sched.rows.row import Row
from engine.sched.rows.running import RunningRows
from engine.sched.rows.step_slack import StepSlack
from engine.sched.rows.work_meter import WorkMeter
from engine.sched.scheduler_view import GroupOffer, SchedulerView
from engine.sched.step_fence import StepFence
from kv_transfer.base import KVConnectorScheduler
from kv_transfer.metadata import KVConnectorOutput, KVTransferParams


class Scheduler:
    """Owns all requests of one engine."""

    _num_arrived = 0

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        connector: KVConnectorScheduler,
        step_log: StepLog | NoStepLog | None = None,
        order: PromptOrder | None = None,
        launches: StepLaunches | None = None,
    ) -> None:
        self._max_num_batched_tokens = config.scheduler.max_num_batched_tokens
        self._limits = RequestLimits(config, num_blocks)
        self._counters = SchedulerCounters()
        self._kv_cache = KVCacheManager.of(config, num_blocks)
        self._fence = StepFence(self._kv_cache)
        slack = StepSlack(config.scheduler.itl_objective_ms / 1000, launches)
        log, chunks = step_log or NoStepLog(), None if order is None else order.chunks
        self._steps = StepsInFlight(self._fence, self._counters, log, slack, chunks)
        rate, kv_cache = self._steps.prefill_rate, self._kv_cache
        self._prompts = PromptSteps(order, config.scheduler.policy, kv_cache, rate)
        self._waiting = self._prompts.waiting
        self.remote = self._remote = RemoteKV(
            connector, kv_cache, self._fence, self._waiting, config, rate, launches
        )
        self._prompts.arrivals = self._remote.arrivals
        self._forks = Forks(self._kv_cache, self._fence, self._waiting, config.scheduler.policy)
        self._requests = RequestTable()
        self.adapters = AdapterTable(config, self._requests, self._waiting)
        parts = self._limits, config, kv_cache, self._fence, self._waiting
        reclaim = self._remote.arrivals.reclaim, self._forks.reclaim
        others = self._remote.host, reclaim, self.adapters, self._counters
        self.running = self._running = RunningRows(*parts, *others)
        self._unreported: set[str] = set()
        """Requests whose first output is still to come."""
        self._choices = self._make_choices(config)
        self._beams = self._choices.beams
        holders = self._waiting, self._running, self._remote, self._forks, self._beams
        counted = self.adapters, self._counters, self._fence
        self.admission = Admission(
            config.scheduler, self._limits, self._kv_cache, *holders, *counted
        )
        self._view = SchedulerView(
            self._requests,
            self._kv_cache,
            self._waiting,
            self._running,
            self._remote,
            self._forks,
            self._fence,
            self._steps,
            self.adapters,
            self._counters,
        )

    def _make_choices(self, config: EngineConfig) -> Choices:
        return Choices(
            config,
            self._limits,
            self._kv_cache,
            self._fence,
            self._running,
            self._remote.prefill.shareable,
            self._forks,
            self._requests,
            self._unreported,
            self._finish,
        )

    # Requests come, are advised on, and go ----------------------------------------------------

    def add_request(self, request: Request) -> EngineCoreOutputs:
        """Adds a request, with its choices; one that can never run ends at once with finish_reason
        `error`.

        Raises:
            ValueError: A request of this id is known already.
        """
        names = request.choice_ids or (request.request_id,)
        for name in (request.request_id, *names):
            if name in self._requests or self._beams.knows(name):
                raise ValueError(f"request {name!r} exists already")
        parts = self._limits, self._remote, self.adapters
        refusal = next(filter(None, (part.refusal(request) for part in parts)), "")
        if refusal:
            request.status = RequestStatus.FINISHED_ERROR
            ends = [EngineCoreOutput(name, [], "error", error=refusal) for name in names]
            return EngineCoreOutputs(outputs=ends)
        self._beams.add(request)
        for known in (request, *self._forks.add(request)):
            self._num_arrived += 1
            known.arrival_order = self._num_arrived
            self._requests[known.request_id] = known
        if not request.is_beam:
            self._unreported.update(names)
        self._remote.add_request(request)
        self._waiting.add(request)
        return EngineCoreOutputs()

    def abort_requests(self, request_ids: Iterable[str], error: str = "") -> EngineCoreOutputs:
        """Aborts requests, or ends them with an error; unknown ids are left alone, as those ended
        meanwhile. KV that an ended request still exports to a peer is called off. A prompt's
        request goes with its choices."""
        outputs = EngineCoreOutputs()
        status = RequestStatus.FINISHED_ERROR if error else RequestStatus.FINISHED_ABORTED
        for request_id in [name for one in request_ids for name in self._forks.listeners(one)]:
            if self._beams.knows(request_id):
                outputs.outputs += self._beams.end(request_id, status, error)
                continue
            request = self._requests.get(request_id)
            if request is None:
                self._remote.exports.abort_of(request_id)
                continue
            output = EngineCoreOutput(request_id, [], error=error)
            self._finish(request, status, output=output)
            outputs.outputs.append(output)
        return outputs

    def supply_first_token(
        self, request_id: str, token_id: int, siblings: Sequence[int] = (), feature: bytes = b""
    ) -> EngineCoreOutputs:
        """Supplies token one, which the prefill node sampled and the client has: that of each
        choice, if the request has any.

        A request that has output of its own already keeps that. One that is prefilling here
        starts again behind the token, so the client never gets two different first tokens.
        """
        request = self._requests.get(request_id)
        if request is None or request.knows_first_token:
            return EngineCoreOutputs()
        request.draft_feature = feature
        if request.choice_ids:
            begun = self._choices.begin(request, [token_id, *siblings])
            self._remote.prefill.first_token_known(request)
            self._choices.share_arrived()
            return EngineCoreOutputs(outputs=[one for one in begun if one.finish_reason])
        if request.status is RequestStatus.RUNNING:
            self._running.preempt(self._running.table.of(request))
        request.append_output_token(token_id)
        end = self._limits.end_at(request, request.num_tokens)
        if end is not None:
            output = EngineCoreOutput(request_id, [])
            self._finish(request, *end, output=output)
            return EngineCoreOutputs(outputs=[output])
        self._remote.prefill.first_token_known(request)
        return EngineCoreOutputs()

    def supply_candidates(self, request_id: str, candidates: TokenLogprobs) -> EngineCoreOutputs:
        """Supplies what the prefill node found for the first token of a beam search."""
        request = self._requests.get(request_id)
        if request is None or request.knows_first_token:
            return EngineCoreOutputs()
        self._beams.supply(request, candidates)
        self._remote.prefill.first_token_known(request)
        return EngineCoreOutputs(outputs=self._choices.share_arrived())

    def prompt_computed(self, request_id: str) -> None:
        """Records that a later attempt's peer has computed the prompt; token one is known."""
        request = self._requests.get(request_id)
        if request is not None:
            self._remote.prefill.prompt_computed(request)

    def retry_remote(self, request_id: str, params: KVTransferParams) -> EngineCoreOutputs:
        """Starts a new attempt, maybe with another peer, unless the prompt is computed here."""
        request = self._requests.get(request_id)
        result = self._remote.prefill.retry(request, params) if request is not None else None
        return EngineCoreOutputs(kv_results=[result] if result is not None else [])

    def prefill_locally(self, request_id: str) -> EngineCoreOutputs:
        """Computes the prompt here, because no KV will come, first token or not."""
        request = self._requests.get(request_id)
        if request is not None:
            self._remote.prefill.prefill_locally(request)
        return EngineCoreOutputs()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached KV. False: requests or transfers hold blocks; nothing changed."""
        if not self._kv_cache.reset_prefix_cache():
            return False
        self._remote.forget_cached()
        return True

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    # One step ---------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Returns the next step; None: nothing could run now, though pulls may have started."""
        running, slack = self._running, self._steps.slack
        self._remote.begin_step()
        step_id = running.step_id + 1
        # The row that was preempted last may come back: no result of a step would call us again.
        may_admit = running.grow_decodes(step_id, slack) or not running.table.num_live
        budget = self._max_num_batched_tokens - running.calendar.num_tokens
        most_prompts = MANY_PROMPTS
        if slack.objective_s:
            decodes = running.calendar.parts()
            budget = slack.limit(budget, decodes, running.calendar.num_idle)
            most_prompts = slack.most_prompts(decodes)
        self._prompts.fill(running, self.admission, budget, most_prompts, may_admit=may_admit)
        if not (running.has_work or running.resume_idle(step_id)):
            return None
        kv = self._remote.build_meta(step_id, running.builder.exported_chunks)
        step, record = running.issue(step_id, kv)
        self._steps.issue(step, record)
        return step

    @property
    def last_shape(self) -> StepShape:
        """Returns the shape of the step that `schedule` returned last."""
        return self._steps.last_shape

    # Results ----------------------------------------------------------------------------------

    def update_from_output(
        self, step: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Results come in the order of their steps.

        Raises:
            ValueError: `output` is not that of the oldest step in flight.
        """
        now = time.monotonic()
        for row_of_chunk, num_computed_tokens in self._steps.retire(step, output, now):
            self._running.confirm_chunk(row_of_chunk, num_computed_tokens)
        rows = (table := self._running.table).rows
        results = [
            EngineCoreOutput(name, [], prompt_logprobs=found.logprobs)
            for found in output.prompt_logprobs
            if (row := rows[found.row]) is not None and row.epoch == found.epoch
            for name in self._forks.listeners(row.request_id)
        ]
        siblings, features = output.siblings_by_row(), output.features_by_row()
        logprobs, unreported = output.logprobs_by_row(), self._unreported
        failures = {failure.row: failure.reason for failure in output.failures}
        query_len = self._running.calendar.query_len
        may_stop = not table.stop_ids.isdisjoint(output.token_ids)
        num_dropped = 0
        for index, epoch, new in zip(
            output.rows, output.epochs, output.tokens_by_request(), strict=True
        ):
            row = rows[index]
            if row is None or row.epoch != epoch:
                num_dropped += len(new)
                continue
            tokens = row.tokens
            if query_len > 1 and len(tokens) > row.prefill_len:
                row.confirm_fewer(query_len - len(new))
            tokens += new
            result = EngineCoreOutput(row.request_id, new)
            results.append(result)
            if unreported and row.request_id in unreported:
                self._choices.report_first(row.request, result)
            if logprobs and index in logprobs:
                result.logprobs = logprobs[index]
            if siblings and index in siblings:
                result.siblings = siblings[index]
            result.draft_feature = features.get(index) if features else None
            if failures and index in failures:
                num_new = len(new)
                results[-1:] = self._fail(row, result, failures[index])
                num_dropped += num_new - len(new)
            elif len(tokens) >= row.check_len or (may_stop and not row.stop_ids.isdisjoint(new)):
                if row.request.choice_ids or row.request.is_beam:
                    results[-1:] = begun = self._choices.prompt_done(row, result)
                    num_dropped += len(new) - sum(len(one.new_token_ids) for one in begun)
                else:
                    num_dropped += self._check(row, result)
        self._counters.generation_tokens += len(output.token_ids) - num_dropped
        return EngineCoreOutputs(outputs=results, timestamp=now)

    def _check(self, row: Row, output: EngineCoreOutput) -> int:
        """Checks whether a block became full or the output ended with one of its new tokens.
        Returns how many tokens behind the end were dropped.
        """
        tokens, new = row.tokens, output.new_token_ids
        if len(tokens) < row.max_len and row.stop_ids.isdisjoint(new):
            self._running.publish(row)
            return 0
        num_before, num_new = len(tokens) - len(new), len(new)
        for count in range(1, num_new + 1):
            end = self._limits.end_at(row.request, num_before + count)
            if end is not None:
                del tokens[num_before + count :], new[count:]
                if output.logprobs is not None:
                    del output.logprobs[count:]
                self._running.publish(row)
                self._finish(row.request, *end, output=output)
                return num_new - count
        self._running.publish(row)
        return 0

    def _fail(self, row: Row, output: EngineCoreOutput, reason: str) -> list[EngineCoreOutput]:
        """Ends a request that cannot go on, unless it has ended with its new tokens: all of its
        choices, if it computes a prompt for several. Returns the outputs of those that end."""
        if row.request.is_beam:
            return self._beams.end(row.request_id, RequestStatus.FINISHED_ERROR, reason)
        if output.new_token_ids:
            self._check(row, output)
        if row.is_gone:
            return [output]
        names = self._forks.listeners(row.request_id)
        outputs = [output] if row.request_id in names else [EngineCoreOutput(n, []) for n in names]
        for one in outputs:
            one.error = reason
            self._finish(self._requests[one.request_id], RequestStatus.FINISHED_ERROR, output=one)
        return outputs

    def _finish(
        self,
        request: Request,
        status: RequestStatus,
        stop_reason: int | None = None,
        *,
        output: EngineCoreOutput,
    ) -> None:
        """Removes the request wherever it is; `output` says so."""
        if request.status is RequestStatus.RUNNING:
            self._running.leave(self._running.table.of(request))
        self._waiting.remove(request)
        self.adapters.request_ended(request.request_id)
        request.status = status
        self._remote.request_ended(request)
        del self._requests[request.request_id]
        self._unreported.discard(request.request_id)
        if (prompt := self._forks.choice_ended(request)) is not None:
            self._choices.discard(prompt)
        output.finish_reason = status.finish_reason
        output.stop_reason = stop_reason

    def update_from_connector(self, output: KVConnectorOutput) -> EngineCoreOutputs:
        """Transfers went on or ended."""
        results, answers = self._remote.update(output), self._choices.share_arrived()
        now = time.monotonic()
        return EngineCoreOutputs(outputs=answers, kv_results=results, timestamp=now)

    # What there is ----------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        return self._view.stats()

    def offer(self, request: Request) -> GroupOffer:
        return self._view.offer(request)

    def measure(self, meter: WorkMeter) -> None:
        """Counts from now on what steps compute and move."""
        self._running.meter = self._steps.meter = meter

    def shrink_chunks(self, chunks: EvenChunks) -> None:
        """Cuts prompts from now on so that all chunks take the same time."""
        self._running.even_chunks = chunks

    def facts(self) -> EngineFacts:
        """Returns what a crash report says of requests, blocks and transfers."""
        return self._view.facts()

    def check_empty(self) -> list[str]:
        """Names everything that is left though no request should be; empty when all is well."""
        first = [f"first output of {name}" for name in self._unreported]
        return self._view.leftovers() + first + self._beams.leftovers()
