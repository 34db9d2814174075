"""Tells what a scheduler has: its statistics, and what is left of it when nothing should be.

It only reads, at any moment between two calls of the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.outputs import SchedulerStats
from engine.request import Request
from engine.sched.counters import SchedulerCounters
from engine.sched.forks import Forks
from engine.sched.in_flight import StepsInFlight
from engine.sched.remote_kv import RemoteKV
from engine.sched.request_queue import RequestQueue
from engine.sched.running import RunningRows
from engine.sched.step_fence import StepFence


class SchedulerView:
    """Looks at the parts of one scheduler; `requests` are all that it knows, by id."""

    def __init__(
        self,
        requests: Mapping[str, Request],
        kv_cache: KVCacheManager,
        waiting: RequestQueue,
        running: RunningRows,
        remote: RemoteKV,
        forks: Forks,
        fence: StepFence,
        steps: StepsInFlight,
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
        self._counters = counters

    def stats(self) -> SchedulerStats:
        """Returns the statistics, all but what only the executor knows."""
        counters, remote, table = self._counters, self._remote, self._running.table
        return SchedulerStats(
            num_running=table.num_live,
            num_waiting=len(self._waiting) + len(self._forks.ready),
            num_waiting_for_remote_kvs=remote.pulls.num_started,
            num_waiting_tokens=self._waiting.num_tokens + self._running.num_prompt_tokens_left,
            num_free_blocks=self._kv_cache.num_free_blocks,
            num_total_blocks=self._kv_cache.num_blocks,
            num_free_rows=table.num_free,
            num_delayed_frees=len(remote.held),
            prompt_tokens_cached=counters.prefix_cache_hits,
            prompt_tokens_transferred=remote.pulls.num_transferred_tokens,
            prefill_tokens_per_s=self._steps.prefill_rate.tokens_per_s,
            kv_transfer=remote.counters,
            residency=self._kv_cache.residency(),
            **counters.by_name(),
        )

    def leftovers(self) -> list[str]:
        """Names everything that is left though no request should be; empty when all is well."""
        left = [f"request {name} ({r.status.name})" for name, r in self._requests.items()]
        left += self._remote.leftovers() + self._forks.leftovers() + self._steps.leftovers()
        left += [f"row {row.index} of {row.request_id}" for row in self._running.table.live()]
        left += [f"blocks of {name}" for name in self._kv_cache.request_ids()]
        for name, count in (
            ("queued requests", len(self._waiting)),
            ("requests ready for a row", len(self._remote.pulls.ready)),
            ("choices ready for a row", len(self._forks.ready)),
            ("rows in the decode set", self._running.calendar.size),
            ("fenced blocks", self._fence.num_blocks),
            ("blocks in use", self._kv_cache.num_blocks - self._kv_cache.num_free_blocks),
        ):
            if count:
                left.append(f"{count} {name}")
        return left
