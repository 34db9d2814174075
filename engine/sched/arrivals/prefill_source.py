"""KV that prefill nodes compute for this decode node: one pull for each request.

Besides the end of transfers the node server moves them: the first token comes on a way of its own,
an attempt may be followed by another one, with another peer, and `prefill_locally` ends a pull from
anywhere: the request goes on as an ordinary one, behind the tokens whose KV is complete.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from engine.contracts.messages import KVTransferResult
from engine.contracts.request import PulledKV, Request
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.arrivals.arrival import (
    BEING_CALLED_OFF,
    ArrivalState,
    TransferArrival,
    WriterKey,
)
from engine.sched.arrivals.arrivals import Arrivals
from kv_transfer.base import KVConnectorScheduler
from kv_transfer.metadata import KVTransferParams, TransferStats

logger = logging.getLogger(__name__)

_STOP_S = 1.0
"""Writers that were called off answer at once. Who does not, hangs."""


@dataclass(slots=True, eq=False)
class Pull(TransferArrival):
    """Attributes:
    is_computed: The peer of the latest attempt has computed the whole prompt.
    is_retry: The connector knows an earlier attempt.
    next_params: The attempt to begin; None unless RETRYING.
    stop_by: While STOPPING: CLOCK_MONOTONIC seconds after which writers are not waited for.
    """

    is_computed: bool = False
    is_retry: bool = False
    next_params: KVTransferParams | None = None
    stop_by: float = 0.0


class PrefillSource:
    """The KV of whole prompts, from the nodes that their `kv_transfer_params` name."""

    finds_certainly, writes_by_token = False, True

    def __init__(
        self,
        arrivals: Arrivals,
        connector: KVConnectorScheduler,
        kv_cache: KVCacheManager,
        draft_hash: str = "",
    ) -> None:
        self._arrivals = arrivals
        self._connector = connector
        self._kv_cache = kv_cache
        self._draft_hash = draft_hash
        self._warned: set[str] = set()
        """Peers of which was said that their drafter is not ours."""
        self.shareable: list[Request] = []
        """Requests with choices whose KV is all here, to be shared at once."""
        self.num_transferred_tokens = 0

    @property
    def num_started(self) -> int:
        """Returns the number of requests that wait for KV outside of the waiting queue."""
        return self._arrivals.num_started_of(self)

    @property
    def lacks_token(self) -> bool:
        """Returns whether a prompt's KV is here and its first token is not."""
        return self._arrivals.any_in(ArrivalState.HERE)

    def _of(self, request: Request) -> Pull | None:
        arrival = self._arrivals.get(request.request_id)
        return arrival if isinstance(arrival, Pull) else None

    # As a source ------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Adds a pull, before the request is queued."""
        self._arrivals.add(Pull(request, self))

    def find(self, request: Request, num_computed_tokens: int) -> int:
        return self._connector.get_num_new_matched_tokens(request, num_computed_tokens)

    def begin(self, request: Request, num_computed_tokens: int, num_tokens: int) -> None:
        pull = self._of(request)
        assert pull is not None
        self._arrivals.begin(pull, num_computed_tokens, num_tokens, ArrivalState.COMING)
        self._arrivals.name_transfer(pull, _params(request).name)
        request.num_computed_tokens = num_computed_tokens + num_tokens
        has_drafts, before = self._has_drafts(request), request.pulled
        if before is not None and before.first_token < num_computed_tokens:
            first, has_drafts = before.first_token, has_drafts and before.has_drafts
        else:
            first = num_computed_tokens
        request.pulled = PulledKV(first, has_drafts)
        block_ids = self._kv_cache.get_block_ids(request.request_id)
        if pull.is_retry:
            self._connector.retry(request, _params(request), block_ids, num_computed_tokens)
        else:
            self._connector.update_state_after_alloc(request, block_ids, num_tokens)
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
        if not has_drafts and peer.engine_id not in self._warned:
            self._warned.add(peer.engine_id)
            logger.warning(
                "prefill engine %s has another drafter, or none: requests whose prompts it "
                "computes are drafted for by n-grams; give both tiers the same "
                "--speculative-config",
                peer.engine_id,
            )
        return has_drafts

    def stop(self, arrival: Pull) -> WriterKey | None:
        # Said even when nothing is in motion: the peer need not keep KV that will not be pulled.
        if arrival.state in BEING_CALLED_OFF or self._connector.abort(arrival.request):
            return arrival.transfer
        return None

    def received(self, arrival: Pull, stats: TransferStats) -> KVTransferResult | None:
        request = arrival.request
        if arrival.state in BEING_CALLED_OFF:
            self._has_stopped(arrival, request.num_prompt_tokens)
            return None
        self._arrivals.move(arrival, ArrivalState.HERE)
        self.num_transferred_tokens += arrival.num_coming
        if request.knows_first_token:
            self._complete(arrival)
        return KVTransferResult(request.request_id, _params(request).attempt, True, stats)

    def failed(
        self, arrival: Pull, num_tokens_kept: int, failure: KVTransferResult
    ) -> KVTransferResult | None:
        """Keeps what is complete. What follows is decided where the first token is known: by
        `RemotePrefill` of the decode node."""
        if arrival.state in BEING_CALLED_OFF:
            self._has_stopped(arrival, num_tokens_kept)
            return None
        self._keep_part(arrival, num_tokens_kept)
        return failure

    # What the node server says ----------------------------------------------------------------

    def first_token_known(self, request: Request) -> None:
        """Continues a pull whose request has its first token in `request.all_token_ids` now."""
        self.prompt_computed(request)
        pull = self._of(request)
        if pull is None:
            return
        if pull.state is ArrivalState.HERE:
            self._complete(pull)
        elif pull.state is ArrivalState.RECLAIMED:
            self._arrivals.compute_all(pull)

    def prompt_computed(self, request: Request) -> None:
        """Records that the peer has computed the whole prompt: KV that is not here yet must be on
        its way.
        """
        pull = self._of(request)
        if pull is None:
            return
        pull.is_computed = True
        if pull.state is ArrivalState.COMING:
            self._connector.prompt_computed(request)

    def retry(self, request: Request, params: KVTransferParams) -> KVTransferResult | None:
        """Begins a new attempt. Returns a result when the KV is complete already and needs none."""
        pull = self._of(request)
        if pull is None:
            return None
        pull.is_computed = False
        match pull.state:
            case ArrivalState.QUEUED:
                request.kv_transfer_params = params
            case ArrivalState.HERE | ArrivalState.READY:
                return KVTransferResult(request.request_id, params.attempt, True)
            case ArrivalState.RETRYING:
                pull.next_params = params
            case ArrivalState.STOPPING:
                self._call_off(pull, ArrivalState.RETRYING, params)
            case ArrivalState.COMING if self._connector.abort(request):
                self._call_off(pull, ArrivalState.RETRYING, params)
            case ArrivalState.COMING:
                self._keep_part(pull, 0)
                self._begin_again(pull, params)
            case _:
                self._begin_again(pull, params)
        return None

    def prefill_locally(self, request: Request) -> None:
        """Ends the pull. KV that is complete is used: of a whole prompt only the last token is
        computed again, unless all are for their log probabilities."""
        pull = self._of(request)
        if pull is None:
            return
        match pull.state:
            case ArrivalState.QUEUED:
                self._connector.abort(request)
                self._arrivals.move(pull, ArrivalState.ENDED)
            case ArrivalState.READY:
                return
            case ArrivalState.PART:
                self._compute_the_rest(pull)
            case ArrivalState.HERE if not request.needs_prompt_logprobs:
                self._compute_the_rest(pull)
            case ArrivalState.RETRYING | ArrivalState.STOPPING:
                self._call_off(pull, ArrivalState.STOPPING)
            case ArrivalState.COMING if self._connector.abort(request):
                self._call_off(pull, ArrivalState.STOPPING)
            case _:
                self._arrivals.go_on_without(pull)

    def check(self) -> None:
        """Looks after calls to stop, before each step. Writers that do not answer keep their
        blocks, and the request takes others."""
        if not self._arrivals.any_in(ArrivalState.STOPPING):
            return
        now = time.monotonic()
        for pull in self._arrivals.in_state(ArrivalState.STOPPING):
            if isinstance(pull, Pull) and now >= pull.stop_by:
                self._arrivals.go_on_without(pull)

    # Steps of several of these ----------------------------------------------------------------

    def _complete(self, pull: Pull) -> None:
        """Goes on with a pull of which all is here. Only choices need rows, if there are some."""
        if pull.request.choice_ids or pull.request.is_beam:
            self._arrivals.move(pull, ArrivalState.ENDED)
            self.shareable.append(pull.request)
        else:
            self._arrivals.move(pull, ArrivalState.READY)

    def _call_off(
        self, pull: Pull, state: ArrivalState, next_params: KVTransferParams | None = None
    ) -> None:
        """Writers were asked to stop; `state` says what follows."""
        if pull.state is not state:
            self._arrivals.move(pull, state)
        pull.next_params = next_params
        pull.stop_by = time.monotonic() + _STOP_S

    def _has_stopped(self, pull: Pull, num_tokens: int) -> None:
        """Goes on after a transfer that has no writer left and has brought KV for `num_tokens`."""
        next_params, pull.next_params = pull.next_params, None
        self._keep_part(pull, num_tokens)
        if next_params is not None:
            self._begin_again(pull, next_params)
        elif pull.state is ArrivalState.PART:
            self._compute_the_rest(pull)
        else:
            self._arrivals.compute_all(pull)

    def _keep_part(self, pull: Pull, num_tokens: int) -> None:
        """Settles what stays of a pull that ended. Without a gain no block is kept."""
        request = pull.request
        if num_tokens > pull.num_before and not request.needs_prompt_logprobs:
            self._arrivals.move(pull, ArrivalState.PART)
            request.num_computed_tokens = num_tokens
            pull.num_coming = num_tokens - pull.num_before
        else:
            self._arrivals.move(pull, ArrivalState.NOTHING)
            self._arrivals.release_blocks(pull)

    def _compute_the_rest(self, pull: Pull) -> None:
        """Queues the request, which has blocks and KV, maybe of a part, and needs only a row. With
        a window it has what its first token sees, and a prompt token would see more.
        """
        request = pull.request
        num_computed = min(request.num_computed_tokens, request.num_tokens - 1)
        if not self._kv_cache.can_continue(num_computed, request.num_prompt_tokens):
            self._arrivals.compute_all(pull)
            return
        if pull.state is ArrivalState.PART:
            self.num_transferred_tokens += pull.num_coming
        request.num_computed_tokens = num_computed
        self._arrivals.move(pull, ArrivalState.READY)

    def _begin_again(self, pull: Pull, params: KVTransferParams) -> None:
        """Begins the next attempt; no writer is left of the one before. With a part at once, for
        the rest, at least one token; without one from the waiting queue."""
        request = pull.request
        request.kv_transfer_params = params
        pull.is_retry = True
        if pull.state is ArrivalState.PART:
            self.num_transferred_tokens += pull.num_coming
            num_computed = min(request.num_computed_tokens, request.num_prompt_tokens - 1)
            self.begin(request, num_computed, request.num_prompt_tokens - num_computed)
            return
        self._arrivals.move(pull, ArrivalState.QUEUED)
        self._arrivals.requeue(request)


def _params(request: Request) -> KVTransferParams:
    """Returns the parameters of the latest attempt that was begun or queued."""
    assert request.kv_transfer_params is not None
    return request.kv_transfer_params
