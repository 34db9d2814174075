"""The scheduler's side of the connector: KV that comes to requests (`Arrivals`, with its sources),
and KV that goes out: to peers that asked for it (`Exports`, `PrefixOffers`) and to host memory
(`HostStores`).

A transfer ends with one report of the connector: finished_recving or finished_sending, failed or
aborted. Only then are blocks free that their request left behind (`HeldBlocks`).
"""

from __future__ import annotations

from engine.config import EngineConfig
from engine.contracts.messages import KVTransferResult
from engine.contracts.prefix_holder import HashChains
from engine.contracts.request import Request
from engine.contracts.steps.step_launches import StepLaunches
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.arrivals.arrivals import Arrivals
from engine.sched.arrivals.block_tiers import BlockTiers
from engine.sched.arrivals.host_source import HostSource
from engine.sched.arrivals.peer_source import PeerSource
from engine.sched.arrivals.prefill_source import PrefillSource
from engine.sched.arrivals.pull_rates import PullRates
from engine.sched.arrivals.store_source import StoreSource
from engine.sched.arrivals.tier_source import TierSource
from engine.sched.counters import PrefillRate
from engine.sched.departures.exports import Exports, is_exported
from engine.sched.departures.held_blocks import HeldBlocks
from engine.sched.departures.host_stores import HostStores
from engine.sched.departures.prefix_offers import OfferedAnswers, PrefixOffers
from engine.sched.request_queue import RequestQueue
from engine.sched.step_fence import StepFence
from kv_transfer.base import ChunkLike, KVConnectorScheduler
from kv_transfer.errors import KV_TRANSFER
from kv_transfer.metadata import (
    KVConnectorMetadata,
    KVConnectorOutput,
    TransferName,
    TransferStats,
)

_CALLED_OFF = "the peer called the transfer off"


class RemoteKV:
    """Passes each report of the connector to those whom it concerns."""

    def __init__(
        self,
        connector: KVConnectorScheduler,
        kv_cache: KVCacheManager,
        fence: StepFence,
        waiting: RequestQueue,
        config: EngineConfig,
        prefill_rate: PrefillRate,
        launches: StepLaunches | None = None,
    ) -> None:
        self._connector = connector
        self._kv_cache = kv_cache
        self._fence = fence
        self.held = HeldBlocks(fence)
        self.exports = Exports(connector, fence, self.held)
        self._tier = tier = connector.host_tier
        self.stores = HostStores(tier, kv_cache, self.held)
        transfer = config.kv_transfer
        is_shared = transfer is not None and transfer.shares_prefixes
        pulls_prefixes, answers = False, None
        if transfer is not None and is_shared:
            pulls_prefixes = transfer.kv_role == "kv_producer"
            if not pulls_prefixes:
                num_behind = tier.capacity if tier is not None else 0
                answers = OfferedAnswers.of(transfer, kv_cache.num_blocks, num_behind)
        self.offers = PrefixOffers(connector, kv_cache, fence, self.held, answers, is_on=is_shared)
        self.tiers = BlockTiers(kv_cache.block_pool, tier)
        is_always = transfer is not None and transfer.pulls_always
        rates = PullRates(prefill_rate, pulls_always=is_always)
        self.arrivals = arrivals = Arrivals(
            kv_cache, fence, self.held, waiting, config.scheduler.policy
        )
        self.prefill = PrefillSource(arrivals, connector, kv_cache, config.draft_hash)
        self.host = HostSource(arrivals, connector, kv_cache, prefill_rate, launches)
        self.peers = PeerSource(arrivals, connector, kv_cache, rates, is_on=pulls_prefixes)
        self.store = StoreSource(arrivals, tier, kv_cache, prefill_rate)
        self._prefix_sources = [
            source for source in (self.host, self.peers, self.store) if source.is_on
        ]
        arrivals.prefix_sources += self._prefix_sources
        self.tier_sources = [one for one in self._prefix_sources if isinstance(one, TierSource)]

    def refusal(self, request: Request) -> str:
        """Returns why this engine cannot take the request's KV parameters; empty when it can."""
        return self._connector.refusal(request)

    def offer(self, chains: HashChains) -> tuple[int, str, int]:
        """Returns 0, the group that has the prefix, and what `PrefixOffers` does."""
        return 0, *self.offers.offer(chains)

    def add_request(self, request: Request) -> None:
        """Comes before the request is queued."""
        if not self.peers.is_on:
            request.prefix_peer = ""
        params = request.kv_transfer_params
        if params is not None and params.do_remote_prefill and not params.first_token_only:
            self.prefill.add(request)
        elif is_exported(request):
            self.exports.add(request)

    def request_ended(self, request: Request) -> None:
        """Takes the request's blocks: free now, or when no writer or reader is left.
        `request.status` says how it ended."""
        self.arrivals.end(request)
        if (answers := self.offers.answers) is not None and request.status.is_complete:
            behind = self._kv_cache.behind
            answers.add(behind.chains(request, request.num_tokens - 1)[behind.chain_sizes[0]])
        blocks = self._kv_cache.take_blocks(request.request_id)
        if is_exported(request):
            self.exports.request_ended(request, blocks)
        else:
            self._fence.release(blocks)

    def begin_step(self) -> None:
        """Looks after what goes on beside steps."""
        self.prefill.check()
        for source in self._prefix_sources:
            source.check()
        self.stores.store_offered()

    def build_meta(self, step_id: int, chunks: list[ChunkLike]) -> KVConnectorMetadata | None:
        """Takes the chunks of exports."""
        return self.host.build_meta(step_id, chunks)

    def update(self, output: KVConnectorOutput) -> list[KVTransferResult]:
        """Results in the order: arrived, failed, released."""
        self._update_jobs(output)
        results: list[KVTransferResult | None] = []
        for name in (
            *output.finished_sending, *output.finished_recving, *output.failed, *output.aborted,
            *output.released,
        ):  # fmt: skip
            self.held.release(name)
        for name in (*output.failed, *output.aborted, *output.released):
            self.offers.ended(name)
        for name in output.finished_recving:
            arrival = self.arrivals.of_transfer(name)
            if arrival is not None:
                stats = _stats(output, name)
                results.append(arrival.source.received(arrival, stats))
        for name, (reason, is_retryable) in output.failed.items():
            code = output.failure_codes.get(name, KV_TRANSFER)
            results.append(self._failed(output, name, reason, is_retryable, code))
            results.append(self.exports.failed(name, reason, is_retryable))
        for name in output.aborted:
            results.append(self._failed(output, name, _CALLED_OFF, True, KV_TRANSFER))
            results.append(self.exports.failed(name, _CALLED_OFF, True, is_called_off=True))
        for name in output.released:
            results.append(self.exports.released(name, _stats(output, name)))
        return [result for result in results if result is not None]

    def _update_jobs(self, output: KVConnectorOutput) -> None:
        self.stores.jobs_done(output.host_jobs)
        self.offers.jobs_done(output.host_jobs)
        for job in output.host_jobs:
            self.held.release(job)
        # What the store has answered decides whether it is asked again behind a load from the host.
        for source in reversed(self.tier_sources):
            source.update(output)
        for job, is_right in output.host_jobs.items():
            if not is_right and self._tier is not None:
                self._tier.release(job)
        self.stores.store_offered()

    def _failed(
        self,
        output: KVConnectorOutput,
        name: TransferName,
        reason: str,
        is_retryable: bool,
        code: str,
    ) -> KVTransferResult | None:
        """Tells the source of an arrival whose transfer has ended early. Returns a result for
        the node server; None: it needs none."""
        arrival = self.arrivals.of_transfer(name)
        if arrival is None:
            return None
        failure = KVTransferResult(
            arrival.request.request_id,
            name.attempt,
            False,
            reason=reason,
            retryable=is_retryable,
            code=code,
        )
        num_tokens_kept = output.num_tokens_kept.get(name, 0)
        return arrival.source.failed(arrival, num_tokens_kept, failure)

    @property
    def counters(self) -> dict[str, float]:
        more: dict[str, float] = {}
        for source in self._prefix_sources:
            more |= source.counters.by_name()
        if self.offers.is_on:
            more["prefix_offered_tokens"] = float(self.offers.num_offered_tokens)
            more["prefix_offered_tokens_loaded"] = float(self.offers.num_loaded_tokens)
        return {**self._connector.counters, **more}

    def forget_cached(self) -> None:
        """Forgets what was cached outside of the cache, or offered."""
        self.stores.forget()
        if self._tier is not None:
            self._tier.forget_all()
        if self.offers.answers is not None:
            self.offers.answers.clear()

    def leftovers(self) -> list[str]:
        """Names everything that should not be there when no request is."""
        parts = self.arrivals, *self.tier_sources, self.exports, self.held, self.offers
        return [left for part in parts for left in part.leftovers()]


def _stats(output: KVConnectorOutput, name: TransferName) -> TransferStats:
    return output.stats.get(name, TransferStats())
