"""KV that comes in (decode node): one pull for each request, until it enters a row.

    QUEUED ──▶ RECEIVING ──▶ RECEIVED ──(first token known)──▶ ready for a row
      ▲         │  │   │         └──────▶ RECLAIMED
      │   retry │  │   └──▶ FAILED ─┐
      │         ▼  │                │
      ├── REPLACING┘                │
      └─────────────────────────────┘ retry

    1. QUEUED      in the waiting queue; nobody was asked for anything
    2. RECEIVING   all blocks that the request needs until it runs are allocated, and transfer
                   processes write them
    3. REPLACING   called off for another attempt, which begins when no writer is left
    4. RECEIVED    complete; the first token may come before, or long after
    5. FAILED      reported; the node server decides: retry, prefill here, or abort
    6. RECLAIMED   running requests needed the blocks; the prompt is computed here once the first
                   token is known

`prefill_locally` ends a pull from anywhere: the request goes on as an ordinary one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from engine.config import SchedulingPolicy
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.messages import KVTransferResult
from engine.request import Request, RequestStatus
from engine.sched.held_blocks import HeldBlocks
from engine.sched.request_queue import RequestQueue
from engine.sched.step_fence import StepFence
from kv_transfer.base import KVConnectorScheduler
from kv_transfer.metadata import KVTransferParams, TransferStats


class PullPhase(IntEnum):
    QUEUED = 0
    RECEIVING = 1
    REPLACING = 2
    RECEIVED = 3
    FAILED = 4
    RECLAIMED = 5


@dataclass(slots=True, eq=False)
class Pull:
    """`num_external_tokens` come from the peer, after those that were cached here."""

    request: Request
    phase: PullPhase = PullPhase.QUEUED
    num_external_tokens: int = 0
    is_retry: bool = False
    next_params: KVTransferParams | None = None
    """While REPLACING: the attempt to begin."""

    @property
    def params(self) -> KVTransferParams:
        params = self.request.kv_transfer_params
        assert params is not None
        return params


class Pulls:
    """By request id. Requests whose pull ended without KV go back to `waiting`."""

    def __init__(
        self,
        connector: KVConnectorScheduler,
        kv_cache: KVCacheManager,
        fence: StepFence,
        held: HeldBlocks,
        waiting: RequestQueue,
        policy: SchedulingPolicy,
    ) -> None:
        self._connector = connector
        self._kv_cache = kv_cache
        self._fence = fence
        self._held = held
        self._waiting = waiting
        self.ready = RequestQueue(policy)
        """KV and first token are here; a row is all that is missing."""
        self.num_transferred_tokens = 0
        self._pulls: dict[str, Pull] = {}  # [request id]
        self._in_motion: dict[str, Pull] = {}  # [transfer id], RECEIVING or REPLACING

    def get(self, request: Request) -> Pull | None:
        return self._pulls.get(request.request_id)

    @property
    def num_started(self) -> int:
        """Requests that wait for their KV and are not in the waiting queue."""
        return sum(pull.phase is not PullPhase.QUEUED for pull in self._pulls.values())

    @property
    def num_with_blocks(self) -> int:
        received = sum(pull.phase is PullPhase.RECEIVED for pull in self._pulls.values())
        return len(self._in_motion) + received

    def leftovers(self) -> list[str]:
        return [f"pull of request {name} ({pull.phase.name})" for name, pull in self._pulls.items()]

    # From the queue to a row ------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Before the request is queued."""
        self._pulls[request.request_id] = Pull(request)

    def num_external_tokens(self, pull: Pull, num_computed_tokens: int) -> int:
        """Tokens beyond `num_computed_tokens` that the peer will send. With 0 the pull is over,
        and the request an ordinary one."""
        request = pull.request
        count = self._connector.get_num_new_matched_tokens(request, num_computed_tokens)
        if count == 0:
            del self._pulls[request.request_id]
        return count

    def start(self, pull: Pull, num_computed_tokens: int, num_external_tokens: int) -> None:
        """Blocks for the whole need are allocated: the transfer begins now."""
        request = pull.request
        block_ids = self._kv_cache.get_block_ids(request.request_id)
        pull.phase = PullPhase.RECEIVING
        pull.num_external_tokens = num_external_tokens
        request.num_computed_tokens = num_computed_tokens + num_external_tokens
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        self._in_motion[pull.params.transfer_id] = pull
        if pull.is_retry:
            self._connector.retry(request, pull.params, block_ids, num_computed_tokens)
        else:
            self._connector.update_state_after_alloc(request, block_ids, num_external_tokens)

    def enters_row(self, request: Request) -> None:
        """Taken from `ready`."""
        del self._pulls[request.request_id]

    def request_ended(self, pull: Pull) -> None:
        """Aborted, or the first token was the last."""
        del self._pulls[pull.request.request_id]
        self.ready.remove(pull.request)
        self._let_go(pull)

    def reclaim(self) -> bool:
        """Gives up the KV of the newest pull that is complete but has no row, because running
        requests cannot go on otherwise. False: there is none."""
        idle = [pull for pull in self._pulls.values() if pull.phase is PullPhase.RECEIVED]
        if not idle:
            return False
        pull = max(idle, key=lambda pull: pull.request.arrival_order)
        request = pull.request
        self._fence.release(self._kv_cache.take_blocks(request.request_id))
        if request in self.ready:
            self.ready.remove(request)
            self._requeue_as_local(pull)
        else:
            pull.phase = PullPhase.RECLAIMED
        return True

    # What the node server says ----------------------------------------------------------------

    def first_token_known(self, request: Request) -> None:
        """`request.all_token_ids` has it now."""
        pull = self._pulls.get(request.request_id)
        if pull is None:
            return
        if pull.phase is PullPhase.RECEIVED:
            self._is_ready(request)
        elif pull.phase is PullPhase.RECLAIMED:
            self._requeue_as_local(pull)

    def retry(self, request: Request, params: KVTransferParams) -> KVTransferResult | None:
        """A new attempt. A result when the KV is complete already and needs none."""
        pull = self._pulls.get(request.request_id)
        if pull is None:
            return None
        if pull.phase is PullPhase.QUEUED:
            request.kv_transfer_params = params
        elif pull.phase is PullPhase.RECEIVED:
            return KVTransferResult(request.request_id, params.attempt, True)
        else:
            is_writing = pull.phase is PullPhase.REPLACING or (
                pull.phase is PullPhase.RECEIVING and self._connector.abort(request)
            )
            pull.next_params = params
            if is_writing:
                pull.phase = PullPhase.REPLACING
            else:
                self._in_motion.pop(pull.params.transfer_id, None)
                self._restart(pull)
        return None

    def prefill_locally(self, request: Request) -> None:
        """Ends the pull. KV that is complete is used: only the last token is computed again, unless
        all are for their log probabilities."""
        pull = self._pulls.get(request.request_id)
        if pull is None:
            return
        if pull.phase is PullPhase.QUEUED:
            del self._pulls[request.request_id]
            self._connector.abort(request)
        elif pull.phase is PullPhase.RECEIVED and not request.needs_prompt_logprobs:
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            self._is_ready(request)
        else:
            self._let_go(pull)
            self._requeue_as_local(pull)

    # What the connector says ------------------------------------------------------------------

    def received(self, transfer_id: str, stats: TransferStats) -> KVTransferResult | None:
        """None when nobody waits to hear it."""
        pull = self._in_motion.pop(transfer_id, None)
        if pull is None:
            return None
        if pull.phase is PullPhase.REPLACING:
            self._restart(pull)
            return None
        request = pull.request
        pull.phase = PullPhase.RECEIVED
        self.num_transferred_tokens += pull.num_external_tokens
        if request.num_output_tokens > 0:
            self._is_ready(request)
        return KVTransferResult(request.request_id, pull.params.attempt, True, stats)

    def failed(self, transfer_id: str, reason: str, retryable: bool) -> KVTransferResult | None:
        """Failed or aborted: no writer is left."""
        pull = self._in_motion.pop(transfer_id, None)
        if pull is None:
            return None
        if pull.phase is PullPhase.REPLACING:
            self._restart(pull)
            return None
        request = pull.request
        pull.phase = PullPhase.FAILED
        self._fence.release(self._kv_cache.take_blocks(request.request_id))
        return KVTransferResult(
            request.request_id, pull.params.attempt, False, reason=reason, retryable=retryable
        )

    # Steps of several of these ----------------------------------------------------------------

    def _is_ready(self, request: Request) -> None:
        if request not in self.ready:
            self.ready.add(request)

    def _let_go(self, pull: Pull) -> None:
        """The pull's blocks are not the request's any more."""
        request = pull.request
        transfer_id = pull.params.transfer_id
        self._in_motion.pop(transfer_id, None)
        blocks = self._kv_cache.take_blocks(request.request_id)
        # Said even when nothing is in motion: the peer need not keep KV that nobody will pull.
        if pull.phase is PullPhase.REPLACING or self._connector.abort(request):
            self._held.hold(transfer_id, blocks)
        else:
            self._fence.release(blocks)

    def _restart(self, pull: Pull) -> None:
        """No writer is left: from the waiting queue again, with the next attempt."""
        request = pull.request
        self._fence.release(self._kv_cache.take_blocks(request.request_id))
        request.kv_transfer_params = pull.next_params
        pull.next_params = None
        pull.phase = PullPhase.QUEUED
        pull.is_retry = True
        self._requeue(request)

    def _requeue_as_local(self, pull: Pull) -> None:
        del self._pulls[pull.request.request_id]
        self._requeue(pull.request)

    def _requeue(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        self._waiting.add(request)
