"""The scheduler's side of the connector: KV that comes in (`Pulls`) and goes out (`Exports`), and
KV that waits in host memory (`HostKV`).

A transfer ends with one report of the connector: finished_recving or finished_sending, failed or
aborted. Only then are blocks free that their request left behind (`HeldBlocks`).
"""

from __future__ import annotations

from engine.config import EngineConfig
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.messages import KVTransferResult
from engine.request import Request
from engine.sched.block_tiers import BlockTiers
from engine.sched.exports import Exports, is_exported
from engine.sched.held_blocks import HeldBlocks
from engine.sched.host_kv import HostKV
from engine.sched.pulls import Pulls
from engine.sched.request_queue import RequestQueue
from engine.sched.step_fence import StepFence
from kv_transfer.base import ChunkLike, KVConnectorScheduler
from kv_transfer.metadata import KVConnectorMetadata, KVConnectorOutput, TransferStats

_CALLED_OFF = "the peer called the transfer off"


class RemoteKV:
    """Tells each report of the connector to those whom it concerns."""

    def __init__(
        self,
        connector: KVConnectorScheduler,
        kv_cache: KVCacheManager,
        fence: StepFence,
        waiting: RequestQueue,
        config: EngineConfig,
    ) -> None:
        policy, draft_hash = config.scheduler.policy, config.draft_hash
        self._connector = connector
        self._kv_cache = kv_cache
        self._fence = fence
        self.held = HeldBlocks(fence)
        self.exports = Exports(self._connector, fence, self.held)
        self.pulls = Pulls(self._connector, kv_cache, fence, self.held, waiting, policy, draft_hash)
        self.host = HostKV(connector.host_tier, kv_cache, fence, waiting, policy)
        self.tiers = BlockTiers(kv_cache.block_pool, connector.host_tier)

    def refusal(self, request: Request) -> str:
        """Returns why this engine cannot take the request's KV parameters; empty when it can."""
        return self._connector.refusal(request)

    def add_request(self, request: Request) -> None:
        """Comes before the request is queued."""
        params = request.kv_transfer_params
        if params is not None and params.do_remote_prefill and not params.first_token_only:
            self.pulls.add(request)
        elif is_exported(request):
            self.exports.add(request)

    def request_ended(self, request: Request, *, is_abort: bool) -> None:
        """Takes the request's blocks: free now, or when no transfer touches them."""
        self.host.request_ended(request)
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
        self.host.store_offered()

    def build_meta(self, step_id: int, chunks: list[ChunkLike]) -> KVConnectorMetadata | None:
        """Takes the chunks of exports."""
        return self._connector.build_connector_meta(step_id, chunks)

    def update(self, output: KVConnectorOutput) -> list[KVTransferResult]:
        """Results in the order: arrived, failed, released."""
        self.host.jobs_done(output.host_jobs)
        results: list[KVTransferResult | None] = []
        for transfer_id in (
            *output.finished_sending, *output.finished_recving, *output.failed, *output.aborted,
            *output.released,
        ):  # fmt: skip
            self.held.release(transfer_id)
        for transfer_id in output.finished_recving:
            results.append(self.pulls.received(transfer_id, _stats(output, transfer_id)))
        kept = output.num_tokens_kept
        for transfer_id, why in output.failed.items():
            results.append(self.pulls.failed(transfer_id, *why, kept.get(transfer_id, 0)))
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
        return self._connector.counters

    def leftovers(self) -> list[str]:
        """Names everything that should not be there when no request is."""
        parts = self.pulls, self.exports, self.held, self.host
        return [left for part in parts for left in part.leftovers()]


def _stats(output: KVConnectorOutput, transfer_id: str) -> TransferStats:
    return output.stats.get(transfer_id, TransferStats())
