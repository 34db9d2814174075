"""KV that comes in (decode node): one `Pull` for each request, moved through its life.

`prefill_locally` ends a pull from anywhere: the request goes on as an ordinary one, behind the
tokens whose KV is complete.
"""

from __future__ import annotations

import time

from engine.config import SchedulingPolicy
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.messages import KVTransferResult
from engine.request import Request, RequestStatus
from engine.sched.held_blocks import HeldBlocks
from engine.sched.pull import Pull, PullPhase
from engine.sched.request_queue import RequestQueue
from engine.sched.step_fence import StepFence
from kv_transfer.base import KVConnectorScheduler
from kv_transfer.metadata import KVTransferParams, TransferStats

_STOP_S = 1.0
"""Writers that were called off answer at once. Who does not, hangs."""


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
        self._in_motion: dict[str, Pull] = {}  # [transfer id], RECEIVING or STOPPING
        self._to_compute_here: dict[str, Pull] = {}  # [request id], STOPPING for no other attempt

    def get(self, request: Request) -> Pull | None:
        return self._pulls.get(request.request_id)

    @property
    def num_started(self) -> int:
        """Requests that wait for their KV and are not in the waiting queue."""
        return sum(pull.phase is not PullPhase.QUEUED for pull in self._pulls.values())

    @property
    def num_with_blocks(self) -> int:
        return len(self._in_motion) + len(self._idle_with_blocks())

    def _idle_with_blocks(self) -> list[Pull]:
        """Nobody writes into their blocks any more, and no row has them yet."""
        return [
            pull
            for pull in self._pulls.values()
            if pull.phase is PullPhase.RECEIVED or pull.keeps_part
        ]

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
        """Gives up the KV of the newest pull that has some but no row, because running requests
        cannot go on otherwise. False: there is none."""
        idle = self._idle_with_blocks()
        if not idle:
            return False
        pull = max(idle, key=lambda pull: pull.request.arrival_order)
        request = pull.request
        self._fence.release(self._kv_cache.take_blocks(request.request_id))
        if pull.keeps_part:
            pull.keeps_part = False
        elif request in self.ready:
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
            is_writing = pull.phase is PullPhase.STOPPING or (
                pull.phase is PullPhase.RECEIVING and self._connector.abort(request)
            )
            pull.next_params = params
            self._to_compute_here.pop(request.request_id, None)
            if is_writing:
                pull.phase = PullPhase.STOPPING
            else:
                self._in_motion.pop(pull.params.transfer_id, None)
                self._begin_again(pull)
        return None

    def prefill_locally(self, request: Request) -> None:
        """Ends the pull. KV that is complete is used: of a whole prompt only the last token is
        computed again, unless all are for their log probabilities."""
        pull = self._pulls.get(request.request_id)
        if pull is None:
            return
        if pull.phase is PullPhase.QUEUED:
            del self._pulls[request.request_id]
            self._connector.abort(request)
        elif pull.keeps_part or (
            pull.phase is PullPhase.RECEIVED and not request.needs_prompt_logprobs
        ):
            self._compute_the_rest(pull)
        elif pull.phase is PullPhase.STOPPING or (
            pull.phase is PullPhase.RECEIVING and self._connector.abort(request)
        ):
            pull.phase, pull.next_params = PullPhase.STOPPING, None
            pull.stop_by = time.monotonic() + _STOP_S
            self._to_compute_here[request.request_id] = pull
        else:
            self._let_go(pull)
            self._requeue_as_local(pull)

    def check_stopping(self) -> None:
        """Before each step. Writers that do not answer keep their blocks, and the request takes
        others."""
        if not self._to_compute_here:
            return
        now = time.monotonic()
        for pull in list(self._to_compute_here.values()):
            if now >= pull.stop_by:
                self._let_go(pull)
                self._requeue_as_local(pull)

    # What the connector says ------------------------------------------------------------------

    def received(self, transfer_id: str, stats: TransferStats) -> KVTransferResult | None:
        """None when nobody waits to hear it."""
        pull = self._in_motion.pop(transfer_id, None)
        if pull is None:
            return None
        request = pull.request
        if pull.phase is PullPhase.STOPPING:
            self._has_stopped(pull, request.num_prompt_tokens)
            return None
        pull.phase = PullPhase.RECEIVED
        self.num_transferred_tokens += pull.num_external_tokens
        if request.num_output_tokens > 0:
            self._is_ready(request)
        return KVTransferResult(request.request_id, pull.params.attempt, True, stats)

    def failed(
        self, transfer_id: str, reason: str, retryable: bool, num_tokens_kept: int = 0
    ) -> KVTransferResult | None:
        """Failed or aborted: no writer is left. `num_tokens_kept`: from the prompt's beginning,
        with KV that is complete. None when nobody waits to hear it."""
        pull = self._in_motion.pop(transfer_id, None)
        if pull is None:
            return None
        if pull.phase is PullPhase.STOPPING:
            self._has_stopped(pull, num_tokens_kept)
            return None
        request = pull.request
        pull.phase = PullPhase.FAILED
        self._keep_part(pull, num_tokens_kept)
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
        self._to_compute_here.pop(request.request_id, None)
        self._in_motion.pop(transfer_id, None)
        blocks = self._kv_cache.take_blocks(request.request_id)
        # Said even when nothing is in motion: the peer need not keep KV that nobody will pull.
        if pull.phase is PullPhase.STOPPING or self._connector.abort(request):
            self._held.hold(transfer_id, blocks)
        else:
            self._fence.release(blocks)

    def _has_stopped(self, pull: Pull, num_tokens: int) -> None:
        """No writer is left, and so many tokens have their KV."""
        self._to_compute_here.pop(pull.request.request_id, None)
        self._keep_part(pull, num_tokens)
        if pull.next_params is not None:
            self._begin_again(pull)
        elif pull.keeps_part:
            self._compute_the_rest(pull)
        else:
            self._requeue_as_local(pull)

    def _keep_part(self, pull: Pull, num_tokens: int) -> None:
        """Of a pull that ended. Without a gain no block is kept."""
        request = pull.request
        num_before = request.num_computed_tokens - pull.num_external_tokens
        pull.keeps_part = num_tokens > num_before and not request.needs_prompt_logprobs
        if pull.keeps_part:
            request.num_computed_tokens = num_tokens
            pull.num_external_tokens = num_tokens - num_before
        else:
            self._fence.release(self._kv_cache.take_blocks(request.request_id))

    def _compute_the_rest(self, pull: Pull) -> None:
        """A row is all that the request needs: it has blocks and KV, maybe of a part."""
        request = pull.request
        if pull.keeps_part:
            self.num_transferred_tokens += pull.num_external_tokens
        pull.phase, pull.keeps_part = PullPhase.RECEIVED, False
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        self._is_ready(request)

    def _begin_again(self, pull: Pull) -> None:
        """The next attempt; no writer is left of the one before. With KV that was kept at once, for
        the rest, at least one token; without from the waiting queue."""
        request = pull.request
        request.kv_transfer_params = pull.next_params
        pull.next_params = None
        pull.is_retry = True
        if pull.keeps_part:
            pull.keeps_part = False
            self.num_transferred_tokens += pull.num_external_tokens
            num_computed = min(request.num_computed_tokens, request.num_prompt_tokens - 1)
            self.start(pull, num_computed, request.num_prompt_tokens - num_computed)
            return
        self._fence.release(self._kv_cache.take_blocks(request.request_id))
        pull.phase = PullPhase.QUEUED
        self._requeue(request)

    def _requeue_as_local(self, pull: Pull) -> None:
        del self._pulls[pull.request.request_id]
        self._requeue(pull.request)

    def _requeue(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        self._waiting.add(request)
