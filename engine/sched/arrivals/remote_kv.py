"""The scheduler's side of the connector: KV that comes in (`Pulls`) and goes out (`Exports`), and
prefixes from outside of the cache: from host memory (`HostKV`) or from peers (`PeerKV`), to whom
this node offers its own (`PrefixOffers`).

A transfer ends with one report of the connector: finished_recving or finished_sending, failed or
aborted. Only then are blocks free that their request left behind (`HeldBlocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.config import EngineConfig
from engine.contracts.messages import KVTransferResult
from engine.contracts.request import Request
from engine.kv_cache.block_hash import BlockHash
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.arrivals.block_tiers import BlockTiers
from engine.sched.arrivals.early_loads import EarlyLoads
from engine.sched.arrivals.host_kv import HostKV
from engine.sched.arrivals.peer_kv import PeerKV
from engine.sched.arrivals.pull_rates import PullRates
from engine.sched.arrivals.pulls import Pulls
from engine.sched.counters import PrefillRate
from engine.sched.departures.exports import Exports, is_exported
from engine.sched.departures.held_blocks import HeldBlocks
from engine.sched.departures.prefix_offers import OfferedAnswers, PrefixOffers
from engine.sched.request_queue import RequestQueue
from engine.sched.step_fence import StepFence
from kv_transfer.base import ChunkLike, KVConnectorScheduler
from kv_transfer.errors import KV_TRANSFER
from kv_transfer.metadata import KVConnectorMetadata, KVConnectorOutput, TransferStats

_CALLED_OFF = "the peer called the transfer off"


class PrefixSource(Protocol):
    """Brings the KV of a prompt's beginning, if not from the cache. A request that waits
    for it has all its blocks, and comes back in `RemoteKV.ready`. What comes is added to the
    request's `num_cached_tokens`."""

    def num_loadable(self, request: Request, num_cached_tokens: int) -> int: ...
    def start(self, request: Request, num_cached_tokens: int, num_tokens: int) -> None: ...


class RemoteKV:
    """Tells each report of the connector to those whom it concerns."""

    def __init__(
        self,
        connector: KVConnectorScheduler,
        kv_cache: KVCacheManager,
        fence: StepFence,
        waiting: RequestQueue,
        config: EngineConfig,
        prefill_rate: PrefillRate,
    ) -> None:
        policy, draft_hash = config.scheduler.policy, config.draft_hash
        self._connector = connector
        self._kv_cache = kv_cache
        self._fence = fence
        self.held = HeldBlocks(fence)
        self.exports = Exports(self._connector, fence, self.held)
        self.pulls = Pulls(self._connector, kv_cache, fence, self.held, waiting, policy, draft_hash)
        self.early = EarlyLoads(connector)
        tier = connector.host_tier
        short = config.short_prompt
        self.host = HostKV(tier, self.early, kv_cache, fence, waiting, policy, prefill_rate, short)
        transfer = config.kv_transfer
        is_shared = transfer is not None and transfer.shares_prefixes
        pulls_prefixes, answers = False, None
        if transfer is not None and is_shared:
            pulls_prefixes = transfer.kv_role == "kv_producer"
            if not pulls_prefixes:
                num_behind = tier.capacity if tier is not None else 0
                answers = OfferedAnswers.of(transfer, kv_cache.num_blocks, num_behind)
        is_always = transfer is not None and transfer.pulls_always
        rates = PullRates(prefill_rate, pulls_always=is_always)
        self.peers = PeerKV(
            connector, kv_cache, self.held, self.host.ready, rates, is_on=pulls_prefixes
        )
        self.offers = PrefixOffers(connector, kv_cache, fence, self.held, answers, is_on=is_shared)
        self.tiers = BlockTiers(kv_cache.block_pool, tier)

    def refusal(self, request: Request) -> str:
        """Returns why this engine cannot take the request's KV parameters; empty when it can."""
        return self._connector.refusal(request)

    @property
    def has_prefix_sources(self) -> bool:
        """Returns whether prefixes may come from outside of the cache."""
        return self.host.is_on or self.peers.is_on

    @property
    def num_with_blocks(self) -> int:
        """Returns the requests whose prefix comes from outside, which have blocks and no row."""
        return self.host.num_with_blocks + self.peers.num_loading

    def find_prefix(self, request: Request, num_cached_tokens: int) -> tuple[PrefixSource, int]:
        """Returns who has what follows the cached tokens, and how many tokens that may be. This
        host comes first, and peers are asked for what it lacks (`PeerKV.take_over`)."""
        own = self.host.num_loadable(request, num_cached_tokens)
        others = self.peers.num_loadable(request, num_cached_tokens + own)
        return (self.host, own) if own else (self.peers, others)

    def offer(self, names: Sequence[BlockHash]) -> tuple[int, str, int]:
        """Returns 0, the group that has the blocks, and what `PrefixOffers` does."""
        return 0, *self.offers.offer(names)

    def add_request(self, request: Request) -> None:
        """Comes before the request is queued."""
        if not self.peers.is_on:
            request.prefix_peer = ""
        params = request.kv_transfer_params
        if params is not None and params.do_remote_prefill and not params.first_token_only:
            self.pulls.add(request)
        elif is_exported(request):
            self.exports.add(request)

    def request_ended(self, request: Request, *, is_abort: bool) -> None:
        """Takes the request's blocks: free now, or when no transfer touches them."""
        self.host.request_ended(request)
        self.peers.request_ended(request)
        if (answers := self.offers.answers) is not None and not is_abort:
            answers.add(self._kv_cache.block_names(request, request.num_tokens - 1))
        pull = self.pulls.get(request)
        if pull is not None:
            self.pulls.request_ended(pull)
            return
        blocks = self._kv_cache.take_blocks(request.request_id)
        if is_exported(request):
            self.exports.request_ended(request, blocks, is_abort=is_abort)
        else:
            self._fence.release(blocks)

    def begin_step(self) -> None:
        """Looks after what goes on beside steps."""
        self.pulls.check_stopping()
        self.host.check_reads()
        self.host.store_offered()
        self.peers.check_asked()

    def build_meta(self, step_id: int, chunks: list[ChunkLike]) -> KVConnectorMetadata | None:
        """Takes the chunks of exports."""
        return self.early.build_meta(step_id, chunks)

    def update(self, output: KVConnectorOutput) -> list[KVTransferResult]:
        """Results in the order: arrived, failed, released."""
        self.host.loads_begun(output.host_begun)
        self.host.jobs_done(output.host_jobs)
        self.offers.jobs_done(output.host_jobs)
        results: list[KVTransferResult | None] = []
        for transfer_id in (
            *output.finished_sending, *output.finished_recving, *output.failed, *output.aborted,
            *output.released,
        ):  # fmt: skip
            self.held.release(transfer_id)
        for transfer_id in (*output.failed, *output.aborted, *output.released):
            self.offers.ended(transfer_id)
        for transfer_id in output.finished_recving:
            self.peers.received(transfer_id)
            results.append(self.pulls.received(transfer_id, _stats(output, transfer_id)))
        kept = output.num_tokens_kept
        for transfer_id in (*output.failed, *output.aborted):
            self.peers.failed(transfer_id, kept.get(transfer_id, 0))
        for transfer_id, why in output.failed.items():
            part = kept.get(transfer_id, 0)
            code = output.failure_codes.get(transfer_id, KV_TRANSFER)
            results.append(self.pulls.failed(transfer_id, *why, part, code))
            results.append(self.exports.failed(transfer_id, *why))
        for transfer_id in output.aborted:
            part = kept.get(transfer_id, 0)
            results.append(self.pulls.failed(transfer_id, _CALLED_OFF, True, part))
            results.append(self.exports.failed(transfer_id, _CALLED_OFF, True, is_called_off=True))
        for transfer_id in output.released:
            results.append(self.exports.released(transfer_id, _stats(output, transfer_id)))
        return [result for result in results if result is not None]

    @property
    def counters(self) -> dict[str, float]:
        more: dict[str, float] = {}
        if self.peers.is_on:
            more = self.peers.counters.by_name()
        if self.offers.is_on:
            more["prefix_offered_tokens"] = float(self.offers.num_offered_tokens)
            more["prefix_offered_tokens_loaded"] = float(self.offers.num_loaded_tokens)
        if self.host.is_on:
            more["disk_tier_cheaper_to_compute"] = float(self.host.num_cheaper_to_compute)
        return {**self._connector.counters, **more}

    def forget_cached(self) -> None:
        """Forgets what was cached outside of the cache, or offered."""
        self.host.forget_all()
        if self.offers.answers is not None:
            self.offers.answers.clear()

    def leftovers(self) -> list[str]:
        """Names everything that should not be there when no request is."""
        parts = (
            self.pulls,
            self.exports,
            self.held,
            self.host,
            self.early,
            self.peers,
            self.offers,
        )
        return [left for part in parts for left in part.leftovers()]


def _stats(output: KVConnectorOutput, transfer_id: str) -> TransferStats:
    return output.stats.get(transfer_id, TransferStats())
