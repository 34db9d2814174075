"""Decides which requests enter the engine next, with what running ones leave of budget, rows and
blocks.

    ready      KV came from elsewhere, of all tokens or the first: only a row is missing
    searches   all beams of a search, where there is room for all
    choices    of a prompt that is computed: a row and a block or two are missing
    waiting    KV comes from elsewhere (`Arrivals`): all blocks that the request needs until it
                       runs are allocated, then KV is asked for, and it is ready when that is
                       here; if nothing else has anything to compute, it computes while
                       layers come from host memory
               else:   cached prefix, blocks for all known tokens, a row, the first chunk

Where rows or blocks are lacking, the idle class yields its own to any other request (`IdleBlocks`).

Blocks for the whole prompt are taken at once, so only decoding rows ever ask for more. That keeps
prompts that are half computed from preempting each other, and a pull never starts that could not
be used.
"""

from __future__ import annotations

import time

from engine.config import SchedulerConfig
from engine.contracts.request import Request
from engine.contracts.scheduler_output import BeamSeat
from engine.kv_cache.block import KVCacheBlock
from engine.kv_cache.group_manager import BlockTables, RequestBlocks
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.choices.beams import Beams
from engine.sched.choices.forks import Forks
from engine.sched.counters import SchedulerCounters
from engine.sched.departures.exports import is_exported
from engine.sched.idle_blocks import IdleBlocks
from engine.sched.prompts.prompt_order import StepRoom
from engine.sched.remote_kv import RemoteKV
from engine.sched.request_limits import RequestLimits
from engine.sched.request_queue import RequestQueue, SortKey
from engine.sched.rows.adapters import AdapterTable
from engine.sched.rows.row import Row
from engine.sched.rows.running import RunningRows
from engine.sched.step_fence import StepFence

_HEADROOM_STEPS = 16
"""A request is admitted only when those that decode could go on for this many steps. Its blocks are
lost to them for a while (KV is written into them, or a prompt computed); taking the last ones
would only preempt another request at once."""


class Admission:
    """Reads the queues in order; the first request that does not fit stops all behind it."""

    def __init__(
        self,
        config: SchedulerConfig,
        limits: RequestLimits,
        kv_cache: KVCacheManager,
        waiting: RequestQueue,
        running: RunningRows,
        remote: RemoteKV,
        forks: Forks,
        beams: Beams,
        adapters: AdapterTable,
        counters: SchedulerCounters,
        fence: StepFence,
    ) -> None:
        self._config = config
        self._limits = limits
        self._kv_cache = kv_cache
        self._waiting = waiting
        self._running = running
        self._arrivals = remote.arrivals
        self._host = remote.host
        self._forks = forks
        self._beams = beams
        self._adapters = adapters
        self._counters = counters
        self._idle = IdleBlocks(kv_cache, fence, running, remote.arrivals, self._headroom)
        self._stranded: list[str] = []
        """Requests that would be computed here, and cannot be for their images."""
        self._may_take_blocks = True
        """Says that no choice waits for blocks."""
        self.without_room = ""
        """The request that was first in the waiting queue when there was no row or no block for
        it, if the step was not full."""
        self._blocked_at: tuple[str, int, int] | None = None
        """The last attempt: (request that did not fit, free blocks, headroom)."""

    def take_stranded(self) -> list[str]:
        """Returns the requests that left the queues because only another node can compute their
        images. They are to be aborted."""
        stranded, self._stranded = self._stranded, []
        return stranded

    @property
    def longest_part(self) -> int:
        """Returns how many tokens of one prompt a step computes at most."""
        return self._limits.max_chunk

    def admit(self, room: StepRoom) -> None:
        """Admits requests; the step computes as many of their tokens as there is room for."""
        self.admit_prepared(room)
        self.admit_waiting(room)
        self.admit_early()

    def admit_prepared(self, room: StepRoom) -> None:
        """Admits all that have a prompt already, or KV of its beginning."""
        self._admit_ready(room)
        self._admit_searches(room)
        self._may_take_blocks = self._admit_choices(room)

    def _admit_ready(self, room: StepRoom) -> None:
        """Gives rows to requests whose KV is here, all of it or a beginning."""
        ready = self._arrivals.ready
        while ready and not room.is_full and self._idle.may_have_row(ready.peek()):
            if not self._part_of(ready.peek(), ready.peek().num_computed_tokens, room):
                return
            request = self._arrivals.take_ready()
            if self._limits.images.is_stranded(request, request.num_computed_tokens):
                self._stranded.append(request.request_id)
                continue
            self._idle.take_row()
            row = self._enter(request)
            # Certain only now: every rank has its share, and it will be used as it is.
            self._kv_cache.confirm(request, request.num_computed_tokens)
            self._note_place_to_keep(row)
            self._running.add_chunk(row, room)

    def admit_early(self) -> None:
        """Lets a request compute whose layers are still being loaded. The step may have to wait for
        them, so it is only for a time in which there is nothing else to do."""
        if self._running.table.num_live:
            return
        request = self._host.start_early()
        if request is not None:
            room = StepRoom(self._config.max_num_batched_tokens, self._limits.max_chunk)
            self._running.add_chunk(self._enter(request), room)

    def _admit_searches(self, room: StepRoom) -> None:
        """Lets all beams of a search enter together, if rows, blocks and budget suffice."""
        running = self._running
        for group in self._beams.take_branched():
            if len(group.beams) > min(room.left, running.table.num_free):
                continue
            taken = self._beams.sit_down(group, self._headroom())
            if taken is None:
                continue
            seats, copies = taken
            running.builder.copy_blocks(copies)
            rows = [
                self._enter(beam, group.max_len, seat)
                for beam, seat in zip(group.beams, seats, strict=True)
            ]
            self._beams.seated(group, rows)
            for row in rows:
                running.add_chunk(row, StepRoom(1, 1))
            room.take(0, len(rows))

    def _admit_choices(self, room: StepRoom) -> bool:
        """Returns False while a choice waits for blocks, which nothing behind it may take. Nothing
        runs who could give any: then a fork gives up its own."""
        forks, headroom = self._forks, self._headroom()
        while forks.ready and room.left > 0 and self._running.table.num_free > 0:
            taken = forks.take_ready(headroom)
            if taken is not None:
                choice, copies = taken
                row = self._enter(choice)
                self._running.builder.copy_blocks(copies)
                most = min(room.left, self._running.calendar.query_len)
                own = StepRoom(most, 1)
                self._running.add_chunk(row, own)
                room.take(0, most - own.left)
            elif self._running.table.num_live > 0 or forks.waits_for_steps:
                return False
            else:
                forks.reclaim()
        return True

    def admit_waiting(self, room: StepRoom, before: SortKey | None = None) -> None:
        """Admits requests from the waiting queue, those that come `before` a row of that key."""
        if self._may_take_blocks:
            self._admit_waiting(room, before)
            self._adapters.put_back()

    def _admit_waiting(self, room: StepRoom, before: SortKey | None) -> None:
        self.without_room = ""
        while self._waiting and (before is None or self._waiting.first_key < before):
            request = self._waiting.peek()
            if request.is_idle_class and self._running.holds_idle:
                return
            self.without_room = "" if room.is_full else request.request_id
            if self._is_still_blocked(request):
                if not self._frees_some():
                    return
                continue
            if self._adapters.set_aside():
                continue
            if self._arrivals.get(request.request_id) is not None:
                if not self._admit_arrival(request):
                    return
                continue
            if request.spec.images and self._is_stranded(request):
                self._waiting.pop()
                self._stranded.append(request.request_id)
                continue
            found = self._cached_prefix(request) if self._arrivals.prefix_sources else None
            if found is not None and self._admit_arrival(request, found):
                continue
            if not self._admit_local(request, room, found) and not self._frees_some():
                return
        self.without_room = ""

    def _frees_some(self) -> bool:
        """Returns whether blocks became free that beams hold, while nothing runs that could give
        any."""
        idle = self._running.table.num_live == 0 and not self._forks.waits_for_steps
        return idle and self._forks.reclaim()

    def _admit_local(
        self, request: Request, room: StepRoom, found: tuple[BlockTables, int] | None = None
    ) -> int:
        """Returns how many of the request's tokens the step computes; 0 means that it must wait.
        `found`: its cached prefix, if that was looked up already."""
        if room.is_full or not self._idle.may_have_row(request):
            return 0
        num_tokens = request.num_tokens
        cached, num_cached = found or self._cached_prefix(request)
        if not self._part_of(request, num_cached, room):
            self.without_room = ""
            return 0
        if not self._idle.has_blocks(request, num_tokens, cached):
            self._note_blocked(request)
            return 0
        self._idle.take_row()
        blocks = self._allocate(request, num_tokens, cached, num_cached)
        row = self._enter(request)
        if blocks is not None and blocks.borrowed:
            self._running.builder.copy_blocks(self._kv_cache.states.copies_of(blocks))
        self._note_place_to_keep(row)
        return self._running.add_chunk(row, room)

    def _note_place_to_keep(self, row: Row) -> None:
        """Sets where the states of a request that entered are kept: between two of its chunks."""
        if self._config.enable_chunked_prefill:
            row.keep_at = self._kv_cache.states.place_to_keep(row.request)

    def _part_of(self, request: Request, num_cached: int, room: StepRoom) -> int:
        """Returns how many of the request's tokens behind `num_cached` the step computes; 0: it has
        no room for them, or not for all that must be computed in one step."""
        remaining = request.num_tokens - num_cached
        count = room.part(num_cached, remaining)
        whole = min(remaining, self._limits.max_chunk)
        return 0 if count < whole and self._must_stay_whole(whole) else count

    def _admit_arrival(
        self, request: Request, found: tuple[BlockTables, int] | None = None
    ) -> bool:
        """Returns whether the request left the queue, to come back with KV from elsewhere, or
        became an ordinary one. `found`: its cached prefix; None: a prefill node sends its prompt,
        and every state, wherever the cached prefix ends."""
        if self._arrivals.num_with_blocks >= self._config.max_num_seqs:
            return False
        num_known, num_received = request.num_tokens, 0
        if found is None:
            num_known = num_received = request.num_prompt_tokens
            cached, num_cached = self._kv_cache.get_computed_blocks(
                request, num_received - 1, is_pulled=True
            )
            found = self._kv_cache.without_unseen(cached, num_received), num_cached
        cached, num_cached = found
        coming = self._arrivals.find(request, num_cached)
        if coming is None:
            self._arrivals.end(request)
            return num_received > 0
        source, num_coming = coming
        stop = num_cached + num_coming
        if not num_received:
            cached = self._kv_cache.behind.tables(
                request,
                cached,
                stop,
                is_certain=source.finds_certainly,
                is_by_token=source.writes_by_token,
            )
        # The next token's KV is computed here: of a first one that comes from a peer, too.
        need = max(num_known, min(num_known + 1, self._limits.max_len(request) - 1))
        if not self._idle.has_blocks(request, need, cached):
            if num_received:
                self._note_blocked(request)
            return False
        # Of a source that may have less, windows get the blocks once it has said how much it has.
        num_filled = stop if num_received or source.finds_certainly else num_cached
        self._allocate(request, need, cached, num_cached, num_received, num_filled)
        source.begin(request, num_cached, num_coming)
        return True

    def _allocate(
        self,
        request: Request,
        num_tokens: int,
        cached: BlockTables,
        num_cached: int,
        num_received: int = 0,
        num_filled: int = 0,
    ) -> RequestBlocks | None:
        """Takes the first waiting request out of its queue, with blocks for `num_tokens` tokens,
        which are free."""
        self._waiting.pop()
        kv_cache = self._kv_cache
        blocks = kv_cache.allocate_slots(request, num_tokens, cached, num_received, num_filled)
        request.num_computed_tokens = num_cached
        self._note_first_scheduling(request, num_cached)
        return blocks

    def _cached_prefix(self, request: Request) -> tuple[BlockTables, int]:
        """Returns what the request finds in the cache; nothing, if it has room only without: kept
        states take blocks beside the request's own, for as long as they are copied."""
        found, num_tokens = self._kv_cache.get_computed_blocks(request, request.num_tokens - 1)
        if num_tokens == 0:
            return found, 0
        headroom, nothing = self._headroom(), [list[KVCacheBlock]() for _ in found]
        fits = self._kv_cache.can_allocate(request.num_tokens, found, headroom)
        if fits or not self._kv_cache.can_allocate(request.num_tokens, nothing, headroom):
            return found, num_tokens
        return nothing, 0

    def _is_stranded(self, request: Request) -> bool:
        return self._limits.images.is_stranded(request, self._cached_prefix(request)[1])

    def _must_stay_whole(self, count: int) -> bool:
        """Returns whether the prompt must be computed in one step, as it must without chunked
        prefill. A request that comes back with its output may be longer than any step; it is split
        all the same, as it could never go on otherwise.
        """
        if self._config.enable_chunked_prefill:
            return False
        return count <= self._config.max_num_batched_tokens

    def _enter(
        self, request: Request, max_len: int | None = None, beam: BeamSeat | None = None
    ) -> Row:
        return self._running.enter(
            request,
            request.sort_key(self._config.policy),
            max_len or self._limits.max_len(request),
            beam,
            is_exported=is_exported(request),
        )

    def _headroom(self, num_fewer: int = 0) -> int:
        """Returns the blocks that decoding rows may need next, all but `num_fewer` of them."""
        calendar = self._running.calendar
        num_tokens = (calendar.size - num_fewer) * calendar.query_len
        return self._kv_cache.num_blocks_more(num_tokens * _HEADROOM_STEPS)

    def _note_blocked(self, request: Request) -> None:
        free = self._kv_cache.num_free_blocks
        self._blocked_at = (request.request_id, free, self._headroom())

    def _is_still_blocked(self, request: Request) -> bool:
        """Saves looking the same prompt up in the prefix cache before every step."""
        free = self._kv_cache.num_free_blocks
        is_same = self._blocked_at == (request.request_id, free, self._headroom())
        return is_same and not self._idle.may_have_blocks(request)

    def _note_first_scheduling(self, request: Request, num_cached: int) -> None:
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
            request.first_scheduled_at = time.monotonic()
            self._counters.add_lookup(request.num_prompt_tokens, num_cached)
