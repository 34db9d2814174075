"""KV that comes in (decode node): one `Pull` for each request, moved through its life.

`_move` is the only place where a pull changes its state; `pull.py` beside it draws the states and
has the table of changes. `prefill_locally` ends a pull from anywhere: the request goes on as an
ordinary one, behind the tokens whose KV is complete.
"""

from __future__ import annotations

import logging
import time

from engine.config import SchedulingPolicy
from engine.contracts.messages import KVTransferResult
from engine.contracts.request import PulledKV, Request, RequestStatus
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.arrivals.pull import (
    BEING_CALLED_OFF,
    IDLE_WITH_BLOCKS,
    IN_MOTION,
    NEXT_STATES,
    Pull,
    PullState,
)
from engine.sched.departures.held_blocks import HeldBlocks
from engine.sched.request_queue import RequestQueue
from engine.sched.step_fence import StepFence
from kv_transfer.base import KVConnectorScheduler
from kv_transfer.errors import KV_TRANSFER
from kv_transfer.metadata import KVTransferParams, TransferStats

logger = logging.getLogger(__name__)

_STOP_S = 1.0
"""Writers that were called off answer at once. Who does not, hangs."""


class Pulls:
    """Finds pulls by request id, transfer id and state. Requests whose pull ended without KV go
    back to `waiting`."""

    def __init__(
        self,
        connector: KVConnectorScheduler,
        kv_cache: KVCacheManager,
        fence: StepFence,
        held: HeldBlocks,
        waiting: RequestQueue,
        policy: SchedulingPolicy,
        draft_hash: str = "",
    ) -> None:
        self._draft_hash = draft_hash
        self._told: set[str] = set()
        """Peers of which was said that their drafter is not ours."""
        self._connector = connector
        self._kv_cache = kv_cache
        self._fence = fence
        self._held = held
        self._waiting = waiting
        self.ready = RequestQueue(policy)
        """The requests of all pulls that are READY."""
        self.shareable: list[Request] = []
        """Requests with choices whose pull has ended with all of it, to be shared at once."""
        self.num_transferred_tokens = 0
        self._pulls: dict[str, Pull] = {}  # [request id]
        self._of_transfer: dict[str, Pull] = {}  # [transfer id]
        self._in: dict[PullState, dict[str, Pull]] = {state: {} for state in PullState}

    def get(self, request: Request) -> Pull | None:
        return self._pulls.get(request.request_id)

    @property
    def num_started(self) -> int:
        """Returns the number of requests that wait for KV outside of the waiting queue."""
        return len(self._pulls) - len(self._in[PullState.QUEUED])

    @property
    def num_with_blocks(self) -> int:
        return sum(len(self._in[state]) for state in (*IN_MOTION, *IDLE_WITH_BLOCKS))

    def count_by_state(self) -> dict[str, int]:
        """Returns how many pulls are in each state that any is in."""
        return {state.name.lower(): len(found) for state, found in self._in.items() if found}

    def leftovers(self) -> list[str]:
        return [f"pull of request {name} ({pull.state.name})" for name, pull in self._pulls.items()]

    # From the queue to a row ------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Begins a pull, before the request is queued."""
        assert request.kv_transfer_params is not None
        pull = Pull(request, request.kv_transfer_params.transfer_id)
        self._pulls[request.request_id] = pull
        self._of_transfer[pull.transfer_id] = pull
        self._in[pull.state][request.request_id] = pull

    def num_external_tokens(self, pull: Pull, num_computed_tokens: int) -> int:
        """Returns the number of tokens beyond `num_computed_tokens` that the peer will send. With
        0 the pull is over, and the request an ordinary one."""
        count = self._connector.get_num_new_matched_tokens(pull.request, num_computed_tokens)
        if count == 0:
            self._move(pull, PullState.ENDED)
        return count

    def start(self, pull: Pull, num_computed_tokens: int, num_external_tokens: int) -> None:
        """Begins the transfer: blocks for the whole need are allocated."""
        request = pull.request
        self._move(pull, PullState.RECEIVING)
        block_ids = self._kv_cache.get_block_ids(request.request_id)
        pull.num_external_tokens = num_external_tokens
        request.num_computed_tokens = num_computed_tokens + num_external_tokens
        has_drafts, before = self._has_drafts(request), request.pulled
        if before is not None and before.first_token < num_computed_tokens:
            first, has_drafts = before.first_token, has_drafts and before.has_drafts
        else:
            first = num_computed_tokens
        request.pulled = PulledKV(first, has_drafts)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        if pull.is_retry:
            self._connector.retry(request, pull.params, block_ids, num_computed_tokens)
        else:
            self._connector.update_state_after_alloc(request, block_ids, num_external_tokens)
        if pull.is_computed:
            self._connector.prompt_computed(request)

    def _has_drafts(self, request: Request) -> bool:
        """Returns whether the peer keeps what our drafter keeps; where not, that is logged, once a
        peer."""
        params = request.kv_transfer_params
        if not self._draft_hash or params is None or params.peer is None:
            return False
        peer = params.peer
        has_drafts = peer.layout.draft_hash == self._draft_hash
        if not has_drafts and peer.engine_id not in self._told:
            self._told.add(peer.engine_id)
            logger.warning(
                "prefill engine %s has another drafter, or none: requests whose prompts it "
                "computes are drafted for by n-grams; give both tiers the same "
                "--speculative-config",
                peer.engine_id,
            )
        return has_drafts

    def take_ready(self) -> Request:
        """Returns the first request of `ready`, which enters a row now."""
        request = self.ready.peek()
        self._move(self._pulls[request.request_id], PullState.ENDED)
        return request

    def request_ended(self, pull: Pull) -> None:
        """Ends the pull: the request was aborted, or its first token was the last."""
        self._let_go(pull)
        self._move(pull, PullState.ENDED)

    def reclaim(self) -> bool:
        """Gives up the KV of the newest pull that has some but no row, because running requests
        cannot go on otherwise. Returns False when there is none."""
        idle = [pull for state in IDLE_WITH_BLOCKS for pull in self._in[state].values()]
        if not idle:
            return False
        pull = max(idle, key=lambda pull: pull.request.arrival_order)
        self._fence.release(self._kv_cache.take_blocks(pull.request.request_id))
        if pull.state is PullState.PARTIAL:
            self._move(pull, PullState.FAILED)
        elif pull.state is PullState.RECEIVED:
            self._move(pull, PullState.RECLAIMED)
        else:
            self._requeue_as_local(pull)
        return True

    # What the node server says ----------------------------------------------------------------

    def first_token_known(self, request: Request) -> None:
        """Continues a pull whose request has its first token in `request.all_token_ids` now."""
        self.prompt_computed(request)
        pull = self._pulls.get(request.request_id)
        if pull is None:
            return
        if pull.state is PullState.RECEIVED:
            self._complete(pull)
        elif pull.state is PullState.RECLAIMED:
            self._requeue_as_local(pull)

    def prompt_computed(self, request: Request) -> None:
        """Records that the peer has computed the whole prompt: KV that is not here yet must be on
        its way.
        """
        pull = self._pulls.get(request.request_id)
        if pull is None:
            return
        pull.is_computed = True
        if pull.state is PullState.RECEIVING:
            self._connector.prompt_computed(request)

    def retry(self, request: Request, params: KVTransferParams) -> KVTransferResult | None:
        """Begins a new attempt. Returns a result when the KV is complete already and needs none."""
        pull = self._pulls.get(request.request_id)
        if pull is None:
            return None
        pull.is_computed = False
        match pull.state:
            case PullState.QUEUED:
                request.kv_transfer_params = params
            case PullState.RECEIVED | PullState.READY:
                return KVTransferResult(request.request_id, params.attempt, True)
            case PullState.RETRYING:
                pull.next_params = params
            case PullState.STOPPING:
                self._call_off(pull, PullState.RETRYING, params)
            case PullState.RECEIVING if self._connector.abort(request):
                self._call_off(pull, PullState.RETRYING, params)
            case PullState.RECEIVING:
                self._keep_part(pull, 0)
                self._begin_again(pull, params)
            case _:
                self._begin_again(pull, params)
        return None

    def prefill_locally(self, request: Request) -> None:
        """Ends the pull. KV that is complete is used: of a whole prompt only the last token is
        computed again, unless all are for their log probabilities."""
        pull = self._pulls.get(request.request_id)
        if pull is None:
            return
        match pull.state:
            case PullState.QUEUED:
                self._connector.abort(request)
                self._move(pull, PullState.ENDED)
            case PullState.READY:
                return
            case PullState.PARTIAL:
                self._compute_the_rest(pull)
            case PullState.RECEIVED if not request.needs_prompt_logprobs:
                self._compute_the_rest(pull)
            case PullState.RETRYING | PullState.STOPPING:
                self._call_off(pull, PullState.STOPPING)
            case PullState.RECEIVING if self._connector.abort(request):
                self._call_off(pull, PullState.STOPPING)
            case _:
                self._let_go(pull)
                self._requeue_as_local(pull)

    def check_stopping(self) -> None:
        """Looks after calls to stop, before each step. Writers that do not answer keep their
        blocks, and the request takes others."""
        stopping = self._in[PullState.STOPPING]
        if not stopping:
            return
        now = time.monotonic()
        for pull in list(stopping.values()):
            if now >= pull.stop_by:
                self._let_go(pull)
                self._requeue_as_local(pull)

    # What the connector says ------------------------------------------------------------------

    def received(self, transfer_id: str, stats: TransferStats) -> KVTransferResult | None:
        """Ends a pull whose KV has all arrived. Returns None when nothing waits for it."""
        pull = self._in_motion(transfer_id)
        if pull is None:
            return None
        request = pull.request
        if pull.state in BEING_CALLED_OFF:
            self._has_stopped(pull, request.num_prompt_tokens)
            return None
        self._move(pull, PullState.RECEIVED)
        self.num_transferred_tokens += pull.num_external_tokens
        if request.knows_first_token:
            self._complete(pull)
        return KVTransferResult(request.request_id, pull.params.attempt, True, stats)

    def failed(
        self,
        transfer_id: str,
        reason: str,
        retryable: bool,
        num_tokens_kept: int = 0,
        code: str = KV_TRANSFER,
    ) -> KVTransferResult | None:
        """Ends a pull whose transfer failed or was aborted: no writer is left. `num_tokens_kept`:
        from the prompt's beginning, with KV that is complete. Returns None when nothing waits to
        receive it.
        """
        pull = self._in_motion(transfer_id)
        if pull is None:
            return None
        if pull.state in BEING_CALLED_OFF:
            self._has_stopped(pull, num_tokens_kept)
            return None
        self._keep_part(pull, num_tokens_kept)
        name, attempt = pull.request.request_id, pull.params.attempt
        return KVTransferResult(name, attempt, False, reason=reason, retryable=retryable, code=code)

    def _in_motion(self, transfer_id: str) -> Pull | None:
        pull = self._of_transfer.get(transfer_id)
        return pull if pull is not None and pull.state in IN_MOTION else None

    # Steps of several of these ----------------------------------------------------------------

    def _move(self, pull: Pull, state: PullState) -> None:
        """Raises ValueError for a change that the table lacks."""
        request_id = pull.request.request_id
        if state not in NEXT_STATES[pull.state]:
            raise ValueError(
                f"the pull of request {request_id} cannot go from {pull.state.name} to {state.name}"
            )
        del self._in[pull.state][request_id]
        if pull.state is PullState.READY:
            self.ready.remove(pull.request)
        pull.state = state
        if state is PullState.ENDED:
            del self._pulls[request_id]
            del self._of_transfer[pull.transfer_id]
            return
        self._in[state][request_id] = pull
        if state is PullState.READY:
            self.ready.add(pull.request)

    def _complete(self, pull: Pull) -> None:
        """Goes on with a pull of which all is here. Only choices need rows, if there are some."""
        if pull.request.choice_ids or pull.request.is_beam:
            self._move(pull, PullState.ENDED)
            self.shareable.append(pull.request)
        else:
            self._move(pull, PullState.READY)

    def _call_off(
        self, pull: Pull, state: PullState, next_params: KVTransferParams | None = None
    ) -> None:
        """Writers were asked to stop; `state` says what follows."""
        if pull.state is not state:
            self._move(pull, state)
        pull.next_params = next_params
        pull.stop_by = time.monotonic() + _STOP_S

    def _let_go(self, pull: Pull) -> None:
        """Takes the pull's blocks from the request: free now, or when nothing writes them."""
        request = pull.request
        blocks = self._kv_cache.take_blocks(request.request_id)
        # Said even when nothing is in motion: the peer need not keep KV that nothing will pull.
        if pull.state in BEING_CALLED_OFF or self._connector.abort(request):
            self._held.hold(pull.transfer_id, blocks)
        else:
            self._fence.release(blocks)

    def _has_stopped(self, pull: Pull, num_tokens: int) -> None:
        """Goes on after a transfer that has no writer left and has brought KV for `num_tokens`."""
        next_params, pull.next_params = pull.next_params, None
        self._keep_part(pull, num_tokens)
        if next_params is not None:
            self._begin_again(pull, next_params)
        elif pull.state is PullState.PARTIAL:
            self._compute_the_rest(pull)
        else:
            self._requeue_as_local(pull)

    def _keep_part(self, pull: Pull, num_tokens: int) -> None:
        """Settles what stays of a pull that ended. Without a gain no block is kept."""
        request = pull.request
        num_before = request.num_computed_tokens - pull.num_external_tokens
        if num_tokens > num_before and not request.needs_prompt_logprobs:
            self._move(pull, PullState.PARTIAL)
            request.num_computed_tokens = num_tokens
            pull.num_external_tokens = num_tokens - num_before
        else:
            self._move(pull, PullState.FAILED)
            self._fence.release(self._kv_cache.take_blocks(request.request_id))

    def _compute_the_rest(self, pull: Pull) -> None:
        """Queues the request, which has blocks and KV, maybe of a part, and needs only a row. With
        a window it has what its first token sees, and a prompt token would see more.
        """
        request = pull.request
        num_computed = min(request.num_computed_tokens, request.num_tokens - 1)
        if not self._kv_cache.can_continue(num_computed, request.num_prompt_tokens):
            self._fence.release(self._kv_cache.take_blocks(request.request_id))
            self._requeue_as_local(pull)
            return
        if pull.state is PullState.PARTIAL:
            self.num_transferred_tokens += pull.num_external_tokens
        request.num_computed_tokens = num_computed
        self._move(pull, PullState.READY)

    def _begin_again(self, pull: Pull, params: KVTransferParams) -> None:
        """Begins the next attempt; no writer is left of the one before. With a part at once, for
        the rest, at least one token; without one from the waiting queue."""
        request = pull.request
        request.kv_transfer_params = params
        pull.is_retry = True
        if pull.state is PullState.PARTIAL:
            self.num_transferred_tokens += pull.num_external_tokens
            num_computed = min(request.num_computed_tokens, request.num_prompt_tokens - 1)
            self.start(pull, num_computed, request.num_prompt_tokens - num_computed)
            return
        self._move(pull, PullState.QUEUED)
        self._requeue(request)

    def _requeue_as_local(self, pull: Pull) -> None:
        self._move(pull, PullState.ENDED)
        self._requeue(pull.request)

    def _requeue(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        request.num_computed_tokens, request.prompt_work = 0, None
        self._waiting.add(request)
