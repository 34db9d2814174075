"""Tells what a scheduler has: its statistics, and what is left of it when nothing should be.

It only reads, at any moment between two calls of the scheduler.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from engine.contracts.outputs import SchedulerStats
from engine.contracts.reports.crash_facts import EngineFacts, RequestFacts, hash_id
from engine.contracts.request import Request
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.choices.forks import Forks
from engine.sched.counters import SchedulerCounters
from engine.sched.remote_kv import RemoteKV
from engine.sched.request_queue import RequestQueue
from engine.sched.request_table import RequestTable
from engine.sched.rows.adapters import AdapterTable
from engine.sched.rows.in_flight import StepsInFlight
from engine.sched.rows.row import Row
from engine.sched.rows.running import RunningRows
from engine.sched.step_fence import StepFence

_MAX_WAITING = 256
"""Requests without a row that a crash report lists."""


class GroupOffer(NamedTuple):
    """Says what one group can do for a request.

    Attributes:
        num_cached_tokens: Tokens of the prompt that it need not compute.
        num_waiting_tokens: Known tokens of other requests that it has yet to compute.
        num_requests: Requests that it has.
        num_free_blocks: Of its KV cache.
        num_given: Requests that it has got so far, however they ended.
        has_room: It could begin with the request now.
    """

    num_cached_tokens: int
    num_waiting_tokens: int
    num_requests: int
    num_free_blocks: int
    has_room: bool
    num_given: int = 0


class SchedulerView:
    """Looks at the parts of one scheduler; `requests` are all that it knows, by id."""

    def __init__(
        self,
        requests: RequestTable,
        kv_cache: KVCacheManager,
        waiting: RequestQueue,
        running: RunningRows,
        remote: RemoteKV,
        forks: Forks,
        fence: StepFence,
        steps: StepsInFlight,
        adapters: AdapterTable,
        counters: SchedulerCounters,
    ) -> None:
        self._requests = requests
        self._kv_cache = kv_cache
        self._waiting = waiting
        self._running = running
        self._remote = remote
        self._forks = forks
        self._fence = fence
        self._steps = steps
        self._adapters = adapters
        self._counters = counters

    def stats(self) -> SchedulerStats:
        """Returns the statistics, all but what only the executor knows."""
        counters, remote, table = self._counters, self._remote, self._running.table
        totals = counters.by_name()
        loaded = [source.counters for source in remote.tier_sources]
        totals["prefix_cache_queries"] += sum(one.tokens_again for one in loaded)
        num_loaded = sum(one.tokens for one in loaded)
        totals["prefix_cache_hits"] += num_loaded
        return SchedulerStats(
            num_running=table.num_live,
            num_waiting=len(self._waiting) + len(self._forks.ready),
            num_waiting_for_remote_kvs=remote.arrivals.num_started,
            num_waiting_tokens=self._waiting.num_tokens + self._running.num_prompt_tokens_left,
            num_idle_class=self._requests.num_idle,
            num_free_blocks=self._kv_cache.num_free_blocks,
            num_total_blocks=self._kv_cache.num_blocks,
            num_free_rows=table.num_free,
            num_delayed_frees=remote.held.num_transfers,
            prompt_tokens_cached=totals["prefix_cache_hits"],
            prompt_tokens_loaded=num_loaded,
            prompt_tokens_from_disk=remote.host.counters.tokens_read,
            prompt_tokens_from_store=remote.store.counters.tokens_read,
            num_evicted_blocks=self._kv_cache.block_pool.num_evicted,
            prompt_tokens_pulled=remote.peers.counters.pulled_tokens,
            prompt_tokens_transferred=remote.prefill.num_transferred_tokens,
            prefill_tokens_per_s=self._steps.prefill_rate.tokens_per_s,
            slack_tokens_per_s=self._steps.slack.tokens_per_s(self._usage()),
            kv_transfer=remote.counters,
            lora=self._adapters.stats(),
            images=self._running.images.stats() if self._running.images.is_on else None,
            residency=self._kv_cache.residency(),
            work=self._steps.meter.stats() if self._steps.meter is not None else None,
            **totals,
        )

    def _usage(self) -> float:
        """Returns the part of blocks or rows in use, whichever are rarer."""
        table, pool = self._running.table, self._kv_cache
        rows = table.num_live / max(1, table.num_live + table.num_free)
        return max(rows, 1 - pool.num_free_blocks / max(1, pool.num_blocks))

    def offer(self, request: Request) -> GroupOffer:
        """Returns what this scheduler could do for a request that it does not have."""
        kv_cache, waiting = self._kv_cache, self._waiting
        most = request.num_tokens - 1
        cached, num_cached = kv_cache.get_computed_blocks(request, most)
        num_outside = self._remote.arrivals.num_certain(request, num_cached)
        fits = kv_cache.can_allocate(request.num_tokens, cached)
        return GroupOffer(
            num_cached_tokens=num_cached + num_outside,
            num_waiting_tokens=waiting.num_tokens + self._running.num_prompt_tokens_left,
            num_requests=len(self._requests),
            num_free_blocks=kv_cache.num_free_blocks,
            has_room=fits and self._running.table.num_free > len(waiting),
        )

    def leftovers(self) -> list[str]:
        """Names everything that is left though no request should be; empty when all is well."""
        left = [f"request {name} ({r.status.name})" for name, r in self._requests.items()]
        left += self._remote.leftovers() + self._forks.leftovers() + self._steps.leftovers()
        left += self._running.images.leftovers()
        left += [f"row {row.index} of {row.request_id}" for row in self._running.table.live()]
        left += [f"blocks of {name}" for name in self._kv_cache.request_ids()]
        for name, count in (
            ("queued requests", len(self._waiting)),
            ("requests ready for a row", len(self._remote.arrivals.ready)),
            ("choices ready for a row", len(self._forks.ready)),
            ("rows in the decode set", self._running.calendar.size),
            ("fenced blocks", self._fence.num_blocks),
            ("blocks in use", self._kv_cache.num_blocks - self._kv_cache.num_free_blocks),
        ):
            if count:
                left.append(f"{count} {name}")
        return left

    def facts(self) -> EngineFacts:
        """Returns what a crash report says of requests, blocks and transfers: no content."""
        table, arrivals = self._running.table, self._remote.arrivals
        in_rows = [self._of_row(row) for row in table.live()]
        others = (one for one in self._requests.values() if one.row < 0)
        return EngineFacts(
            requests=in_rows + [_of_request(one) for one in islice(others, _MAX_WAITING)],
            num_requests=len(self._requests),
            blocks={
                "total": self._kv_cache.num_blocks,
                "free": self._kv_cache.num_free_blocks,
                "waiting_for_steps": self._fence.num_blocks,
                "requests_with_blocks": len(list(self._kv_cache.request_ids())),
            },
            queues={
                "waiting": len(self._waiting),
                "waiting_tokens": self._waiting.num_tokens,
                "arrivals_ready": len(arrivals.ready),
                "choices_ready": len(self._forks.ready),
                "rows_free": table.num_free,
                "rows_decoding": self._running.calendar.size,
                "steps_in_flight": len(self._steps.leftovers()),
            },
            transfers={
                **self._remote.counters,
                **{f"arrivals_{s}": count for s, count in arrivals.count_by_state().items()},
                "exports": self._remote.exports.count,
                "delayed_frees": self._remote.held.num_transfers,
            },
        )

    def _of_row(self, row: Row) -> RequestFacts:
        facts = _of_request(row.request)
        facts.row, facts.state, facts.is_exported = row.index, row.phase.name, row.is_exported
        facts.max_tokens = row.max_len
        return facts


def _of_request(request: Request) -> RequestFacts:
    return RequestFacts(
        request=hash_id(request.request_id),
        state=request.status.name,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_preemptions=request.num_preemptions,
    )
