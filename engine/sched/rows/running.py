"""Requests that are in rows: what each computes in the next step, and who yields when blocks end.

For each step, in this order:

    1. `grow_decodes`: rows that ran out of blocks get one; rows whose last step is scheduled
       leave the decode set; rows whose prefill is scheduled join it
    2. `continue_prefills`: parts of rows still inside their prefill
    3. `enter`, then `add_chunk`, for each request that is admitted; with an order of prompts, 2
       and 3 take turns (`engine.sched.prompt_steps`)

Rows of the idle class, and parts of their prompts, sit out a step in which a prompt of others is
computed within an objective (`StepSlack`): what they would take is others' time to first tokens.

A row that needs a block when none is free:

    blocks wait for a step to retire      sit this step out, they come
    something newer runs                   preempt the newest (under `priority`: the last in order)
    it is the newest itself               it is preempted
    nothing else can yield                 reclaim KV that has no row yet: what arrived, and what
                                          waiting choices share; else sit this step out:
                                          transfers hold the rest, and end

Requesters are served oldest first, so a row that has been served is never the next victim. A
request whose KV goes to a peer has all its blocks from the start and never yields. Beams that keep
their rows never wait for each other: where one cannot go on, all of the search are preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter

from engine.config import EngineConfig
from engine.contracts.request import Request, RequestStatus
from engine.contracts.scheduler_output import (
    BeamSeat,
    SchedulerOutput,
)
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.arrivals.host_source import HostSource
from engine.sched.counters import SchedulerCounters
from engine.sched.prompts.even_chunks import EvenChunks
from engine.sched.prompts.prompt_order import StepRoom
from engine.sched.request_limits import RequestLimits
from engine.sched.request_queue import RequestQueue, SortKey
from engine.sched.rows.adapters import AdapterTable
from engine.sched.rows.adaptive_drafts import AdaptiveDrafts, DraftPlan
from engine.sched.rows.decode_calendar import DecodeCalendar
from engine.sched.rows.image_encoding import ImageEncoding
from engine.sched.rows.in_flight import DraftingStep, InFlightStep
from engine.sched.rows.row import Row, RowPhase, RowTable
from engine.sched.rows.step_builder import StepBuilder
from engine.sched.rows.step_slack import StepSlack
from engine.sched.rows.work_meter import WorkMeter
from engine.sched.step_fence import StepFence
from kv_transfer.metadata import KVConnectorMetadata


class RunningRows:
    """Preempted requests go back to `waiting`. Each of `reclaim` gives up KV that no row has, and
    returns False where there is none."""

    unseat: Callable[[Row], None]
    """Preempts all rows of the beam search that one belongs to."""

    def __init__(
        self,
        limits: RequestLimits,
        config: EngineConfig,
        kv_cache: KVCacheManager,
        fence: StepFence,
        waiting: RequestQueue,
        host: HostSource,
        reclaim: Sequence[Callable[[], bool]],
        adapters: AdapterTable,
        counters: SchedulerCounters,
    ) -> None:
        self._kv_cache = kv_cache
        self._fence = fence
        self._waiting = waiting
        self._host = host
        self._host.preempt = lambda request: self.preempt(self.table.of(request))
        self._reclaim = reclaim
        self._adapters = adapters
        self._counters = counters
        self.images = ImageEncoding(limits.images)
        self.table = RowTable(limits.num_rows)
        self.calendar = DecodeCalendar(kv_cache, config.decode_query_len, config.num_ahead)
        self.builder = StepBuilder(kv_cache)
        self._query_len = config.decode_query_len
        self.drafts: AdaptiveDrafts | None = None
        """Says how many tokens rows of the decode set compute in a step; None: always as many."""
        if config.is_adaptive:
            self.drafts = AdaptiveDrafts(config.decode_query_len)
        self.step_id = -1
        """The last step that went out."""
        self.meter: WorkMeter | None = None
        self.even_chunks: EvenChunks | None = None
        """Says how long chunks are where they shall take the same time; None: as fits."""
        self._joining: list[Row] = []
        """May hold rows that are gone."""
        self._held: list[Row] = []
        """Rows of the idle class that sit steps out; may hold rows that are gone."""
        self.holds_idle = False
        """Says that those sit out the next step."""
        self._prefilling: list[Row] = []

    @property
    def num_prefills(self) -> int:
        """Returns the number of rows inside their prefill."""
        return len(self._prefilling)

    def prefills(self) -> Sequence[Row]:
        """Returns the rows inside their prefill."""
        return self._prefilling

    @property
    def num_prompt_tokens_left(self) -> int:
        """Returns the number of known tokens of rows that no step computes yet."""
        return sum(row.remaining_prefill for row in self._prefilling)

    # Rows come and go -------------------------------------------------------------------------

    def enter(
        self,
        request: Request,
        key: SortKey,
        max_len: int,
        beam: BeamSeat | None = None,
        *,
        is_exported: bool,
    ) -> Row:
        """Gives a row to the request, which has blocks with KV of its first `num_computed_tokens`
        tokens. `beam`: its seat, of a beam that keeps the row.
        """
        blocks = self._kv_cache.get_blocks(request.request_id)
        row = self.table.assign(request, blocks, key, max_len)
        row.is_exported = is_exported
        if self._kv_cache.confirms_blocks:
            row.check_len = self._next_check(row, row.prefill_len)
        request.status = RequestStatus.RUNNING
        self._prefilling.append(row)
        drafts_by_layers, slot = self.calendar.ahead > 0, self._adapters.slot_of(request)
        self.builder.enter(row, slot, beam, drafts_by_layers=drafts_by_layers)
        return row

    def leave(self, row: Row) -> None:
        """Takes the row back; its blocks stay the request's."""
        self._host.left(row.request)
        if row.phase is RowPhase.PREFILL:
            self._prefilling.remove(row)
        elif row.phase is RowPhase.DECODE:
            self.calendar.leave(row, self.step_id)
        self.images.leave(row.request_id)
        self.table.release(row)
        self.builder.finish_row(row.index)

    def preempt(self, row: Row) -> None:
        """Preempts the row as if it were complete: nothing is kept but the confirmed tokens."""
        request = row.request
        self._counters.num_preemptions += 1
        if row.is_seated:
            self.unseat(row)
            return
        self.leave(row)
        self._fence.release(self._kv_cache.take_blocks(request.request_id))
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.pulled = None
        request.num_preemptions += 1
        request.prompt_work = None
        self._waiting.add(request)

    # What rows compute next -------------------------------------------------------------------

    def grow_decodes(self, step_id: int, slack: StepSlack) -> bool:
        """Settles who decodes in step `step_id`. False: blocks are short, admit nothing now."""
        preemptions_before = self._counters.num_preemptions
        others = any(not row.is_idle for row in self._prefilling)
        idle = self.calendar.idle_rows
        # Beams that are seated go on, so that no step shows what others take.
        num_idle = 0 if any(row.is_seated for row in idle) else len(idle)
        self.holds_idle = slack.holds_idle(others, self.calendar.size, num_idle)
        self._settle_idle()
        rows = self.calendar.due(step_id)
        if self._joining:
            rows += self._joining
            self._joining = []
        if len(rows) > 1:
            rows.sort(key=_key)
        for row in rows:
            self._decide(row, step_id)
        return not self._joining and self._counters.num_preemptions == preemptions_before

    def _settle_idle(self) -> None:
        """Has rows of the idle class sit out, or join again."""
        if not self.holds_idle:
            self._joining += self._held
            self._held = []
            return
        for row in list(self.calendar.idle_rows):
            if not row.is_seated:
                self._stop_decoding(row, RowPhase.JOINING)
                self._held.append(row)
        self._held += [row for row in self._joining if row.is_idle]
        self._joining = [row for row in self._joining if not row.is_idle]

    def resume_idle(self, step_id: int) -> bool:
        """Lets rows of the idle class that sit out decode after all, since nothing else does in
        this step. Returns whether there is work now."""
        self.holds_idle = False
        rows, self._held = self._held, []
        for row in rows:
            self._decide(row, step_id)
        return self.has_work

    def _decide(self, row: Row, step_id: int) -> None:
        """Decides for a `row` that is due or wants to join. It may have been preempted a moment
        ago.
        """
        if row.is_gone:
            return
        calendar, last = self.calendar, row.max_len - 1
        query_len = calendar.query_len
        decodes = row.phase is RowPhase.DECODE
        reserved = row.reserved_base + query_len * (step_id - 1) if decodes else row.num_reserved
        if reserved >= last and row.num_certain(reserved, query_len) >= last:
            self._stop_decoding(row, RowPhase.DRAINING)
        elif self._make_room(row, self._wanted(row, reserved)):
            if query_len == 1 and row.is_alone:
                self.builder.keep_states(row, reserved)
            if decodes:
                calendar.plan(row, step_id)
            else:
                calendar.join(row, step_id)
                self.builder.add_to_decode(row.index)
        elif row.is_seated and not row.is_gone:
            self.preempt(row)
        elif not row.is_gone:
            self._stop_decoding(row, RowPhase.JOINING)
            self._joining.append(row)

    def _stop_decoding(self, row: Row, phase: RowPhase) -> None:
        if row.phase is RowPhase.DECODE:
            self.calendar.leave(row, self.step_id)
            self.builder.remove_from_decode(row.index)
        row.phase = phase

    def _make_room(self, row: Row, num_tokens: int) -> bool:
        """Allocates blocks for `num_tokens` tokens. Returns False if the row must wait, or was
        itself preempted."""
        while True:
            grown = self._kv_cache.grow(row.blocks, num_tokens)
            if grown is not None:
                self.builder.add_blocks(row.index, grown)
                return True
            if self._fence.num_blocks > 0 or not self._yield_blocks(row):
                return False
            if row.is_gone:
                return False

    def _yield_blocks(self, wanted_by: Row) -> bool:
        """Frees blocks by preempting the newest request. Returns False if none can be freed."""
        able = [
            row
            for row in self.table.live()
            if row.phase is not RowPhase.DRAINING and not row.is_exported
        ]
        if not able or able == [wanted_by]:
            return any(reclaim() for reclaim in self._reclaim)
        self.preempt(max(able, key=_key))
        return True

    def prefills_in_order(
        self, key: Callable[[Row], SortKey] | None = None
    ) -> deque[tuple[SortKey, Row]]:
        """Returns the rows inside their prefill by `key`, or oldest first. One of the idle class
        that is inside an image goes on: others may wait for the room of its embeddings."""
        rows = self._prefilling
        if self.holds_idle:
            rows = [row for row in rows if not row.is_idle or self.images.holds(row.request_id)]
        keyed = [(row.key if key is None else key(row), row) for row in rows]
        return deque(sorted(keyed, key=itemgetter(0)))

    def continue_prefills(
        self,
        rows: deque[tuple[SortKey, Row]],
        room: StepRoom,
        before: SortKey | None = None,
    ) -> None:
        """Takes parts of `rows` that come `before` another prompt, in order, until the step is
        full."""
        while rows and not room.is_full and (before is None or rows[0][0] < before):
            row = rows[0][1]
            if not row.is_gone and not room.part(row.num_reserved, row.remaining_prefill):
                return
            rows.popleft()
            if not row.is_gone:
                self.add_chunk(row, room)

    def add_chunk(self, row: Row, room: StepRoom) -> int:
        """Schedules as many tokens of the row's prefill as there is room for, and returns their
        number: none, while an image there is not encoded yet, or windows wait for blocks."""
        first = row.num_reserved
        count = room.part(first, row.remaining_prefill)
        if count == 0:
            return 0
        if row.keep_at:
            if first < row.keep_at:
                count = min(count, row.keep_at - first)
            else:
                self.builder.keep_states(row, row.keep_at)
                row.keep_at = 0
        if row.request.spec.images:
            most = self.images.step_tokens - self.calendar.num_tokens
            most -= self.builder.num_chunk_tokens
            count = self.images.limit(row.request, first, count, most)
        if count == 0 or (grown := self._kv_cache.extend(row.blocks, first + count)) is None:
            return 0
        self.builder.add_blocks(row.index, grown)
        if count == row.remaining_prefill == 1 and self._decode_at_once(row, room):
            return 1
        self.images.passed(row.request, first + count)
        room.take(first, count)
        row.num_reserved += count
        self.builder.add_chunk(row, first, count)
        if row.num_reserved == row.prefill_len:
            self._prefilling.remove(row)
            row.phase = RowPhase.JOINING
            self._joining.append(row)
        return count

    def _decode_at_once(self, row: Row, room: StepRoom) -> bool:
        """Lets a row decode that has one token left to compute, with no drafts: a step with chunks
        of prompts fits fewer graphs, and none where decodes draft over states. Returns False where
        the token must be computed as a prompt, or there is no room for what a decode may have."""
        calendar, query_len = self.calendar, self.calendar.query_len
        if not row.may_decode_at_once or self._host.waits_for_layers(row.request):
            return False
        if (row.is_idle and self.holds_idle) or room.left < query_len:
            return False
        grown = self._kv_cache.grow(row.blocks, self._wanted(row, row.num_reserved))
        if grown is None:
            return False
        self.builder.add_blocks(row.index, grown)
        self.builder.add_last_token(row)
        room.take_decode(query_len)
        self._prefilling.remove(row)
        row.prefill_len = row.num_reserved
        if self._kv_cache.confirms_blocks:
            # As behind a chunk, states are free of which copies were made, and what windows passed.
            row.check_len = min(row.max_len, row.num_reserved + 2)
        calendar.join(row, self.step_id + 1)
        return True

    def _wanted(self, row: Row, num_reserved: int) -> int:
        """Returns the tokens for which a row needs blocks that decodes behind `num_reserved`."""
        calendar = self.calendar
        wanted = num_reserved + calendar.query_len + calendar.ahead
        return min(wanted, row.max_len + calendar.query_len - 2)

    @property
    def has_work(self) -> bool:
        """Returns whether the next step computes anything."""
        return self.calendar.size > 0 or self.builder.has_chunks

    def issue(
        self, step_id: int, kv: KVConnectorMetadata | None
    ) -> tuple[SchedulerOutput, InFlightStep]:
        """Sends the step out: its message, and the record of what its result confirms."""
        self.step_id = step_id
        num_decodes = self.calendar.size
        drafts = DraftPlan(self._query_len)
        if self.drafts is not None:
            drafts = self.drafts.next_step(num_decodes)
        query_len = drafts.query_len
        self.builder.images = self.images.take_work()
        step, record = self.builder.build(
            step_id, kv, num_decodes, num_decodes * query_len, drafts.num_drafts
        )
        record.num_idle_decodes = self.calendar.num_idle
        if self.drafts is not None:
            record.drafting = DraftingStep(self.drafts, num_decodes, query_len)
        if self.meter is not None:
            chunks = [
                (row, end, count)
                for (row, end), (_, count) in zip(record.chunks, step.prefill_chunks, strict=True)
            ]
            calendar = self.calendar
            record.work = self.meter.work_of(chunks, calendar.rows, step_id, query_len)
        return step, record

    # What came back ---------------------------------------------------------------------------

    def confirm_chunk(self, row: Row, num_computed_tokens: int) -> None:
        """Records that the chunk's step is done and its KV exists."""
        if not row.is_gone:
            self._host.settle(row.request)
            self._kv_cache.confirm(row.request, num_computed_tokens)

    def publish(self, row: Row) -> None:
        """Publishes confirmed tokens that have reached `check_len`. All but the last have KV."""
        num_tokens = len(row.tokens)
        self._kv_cache.confirm(row.request, num_tokens - 1)
        if self._kv_cache.confirms_blocks:
            row.check_len = self._next_check(row, num_tokens - 1)

    def _next_check(self, row: Row, num_computed_tokens: int) -> int:
        if row.blocks.kept:
            return min(row.max_len, row.blocks.check_len)
        block_size = self._kv_cache.least_block_size
        return min(row.max_len, (num_computed_tokens // block_size + 1) * block_size + 1)


def _key(row: Row) -> SortKey:
    return row.key
