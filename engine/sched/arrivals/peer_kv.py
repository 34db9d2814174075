"""Prefixes from peers: what a prompt lacks here and a named peer has is pulled, not computed.

    a request that names a peer, with blocks for all its tokens, maybe behind KV from host memory
       │ start                      the node server is asked to ask the peer (`take_asks`)
       ▼
     ASKED ── no, or computing is quicker ──────────┐
       │ `answered`                                 ▼
       ▼                                          ready ──▶ a row, behind whatever KV there is
    PULLING ── all of it, a part, or nothing ───────▲

It asks once; whatever goes wrong, the prompt is computed behind the part that is here. A peer that
does not answer is waited for no longer than `ASK_LIMIT_S`. Blocks are asked for by hash, which
begins with the tenant's salt, so nothing is given what another tenant computed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.contracts.messages import PrefixAsk
from engine.contracts.request import Request, RequestStatus
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.arrivals.pull_rates import PullRates
from engine.sched.arrivals.source_rate import PullDecision
from engine.sched.departures.held_blocks import HeldBlocks
from engine.sched.request_queue import RequestQueue
from kv_transfer.base import KVConnectorScheduler
from kv_transfer.metadata import KVTransferParams

ASK_LIMIT_S = 2.0


@dataclass(slots=True, eq=False)
class _Fetch:
    """One prefix on its way, as a connector reads a request: `num_prompt_tokens` of it."""

    request: Request
    peer: str
    num_cached: int
    asked_at: float
    num_prompt_tokens: int = 0
    kv_transfer_params: KVTransferParams | None = None
    started_at: float = 0.0

    @property
    def request_id(self) -> str:
        return self.request.request_id


@dataclass(slots=True)
class PeerKVCounters:
    """Counts since the start, named as metrics name them."""

    pulled_tokens: int = 0
    pulls: int = 0
    failures: int = 0
    misses: int = 0
    """Peers that had nothing that was lacking, or did not answer."""
    cheaper_to_compute: int = 0

    def by_name(self) -> dict[str, float]:
        return {
            "prefix_pulled_tokens": float(self.pulled_tokens),
            "prefix_pulls": float(self.pulls),
            "prefix_pull_failures": float(self.failures),
            "prefix_misses": float(self.misses),
            "prefix_cheaper_to_compute": float(self.cheaper_to_compute),
        }


class PeerKV:
    """Puts requests into `ready`, which it shares with KV from host memory."""

    def __init__(
        self,
        connector: KVConnectorScheduler,
        kv_cache: KVCacheManager,
        held: HeldBlocks,
        ready: RequestQueue,
        rates: PullRates,
        *,
        is_on: bool,
    ) -> None:
        self.is_on = is_on
        self.counters = PeerKVCounters()
        self._connector = connector
        self._kv_cache = kv_cache
        self._held = held
        self._ready = ready
        self._rates = rates
        self._fetches: dict[str, _Fetch] = {}  # [request id]
        self._of_transfer: dict[str, _Fetch] = {}
        self._asks: list[PrefixAsk] = []

    @property
    def num_loading(self) -> int:
        return len(self._fetches)

    def num_loadable(self, request: Request, num_cached_tokens: int) -> int:
        """Returns the number of tokens behind the cached ones that a peer may have; 0 where it is
        not worth asking. At least one token is left to be computed."""
        if not self.is_on or not request.prefix_peer or request.needs_prompt_logprobs:
            return 0
        block_size = self._kv_cache.least_block_size
        count = (request.num_tokens - 1) // block_size * block_size - num_cached_tokens
        if count <= 0:
            request.prefix_peer = ""
        elif not request.tries_prefix_peer and not self._is_worth_asking(request, count):
            request.prefix_peer = ""
            self.counters.cheaper_to_compute += 1
        return count if request.prefix_peer else 0

    def _is_worth_asking(self, request: Request, num_tokens: int) -> bool:
        """A try is decided once, or the next look at the request, as before the peer answers and
        after, would find the peer slower and the try spent."""
        verdict = self._rates.verdict(request.prefix_peer, num_tokens)
        request.tries_prefix_peer = verdict in (PullDecision.ON_TRUST, PullDecision.ON_CREDIT)
        return verdict.is_to_take

    def start(self, request: Request, num_cached_tokens: int, num_tokens: int) -> None:
        """Begins to ask: blocks for the whole need are allocated."""
        names = self._kv_cache.block_names(request, num_cached_tokens + num_tokens)
        fetch = _Fetch(request, request.prefix_peer, num_cached_tokens, time.monotonic())
        self._fetches[request.request_id] = fetch
        self._asks.append(PrefixAsk(request.request_id, request.prefix_peer, names))
        request.prefix_peer = ""
        request.num_computed_tokens = num_cached_tokens
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS

    def take_over(self, request: Request) -> bool:
        """Begins to ask for what is missing behind KV from elsewhere. Returns False for a request
        that is as far as it gets."""
        count = self.num_loadable(request, request.num_computed_tokens)
        if count:
            self.start(request, request.num_computed_tokens, count)
        return count > 0

    def take_asks(self) -> list[PrefixAsk]:
        """Returns what the node server has to ask peers now."""
        asks, self._asks = self._asks, []
        return asks

    def answered(self, request_id: str, params: KVTransferParams | None, num_blocks: int) -> None:
        """Goes on after a peer's answer: it holds `num_blocks` from the prompt's beginning for
        `params`. None: nothing."""
        fetch = self._fetches.get(request_id)
        if fetch is None or fetch.kv_transfer_params is not None:
            self._refuse(request_id, params)
            return
        num_tokens = num_blocks * self._kv_cache.least_block_size
        if params is None or num_tokens <= fetch.num_cached:
            self._refuse(request_id, params)
            self.counters.misses += 1
            self._done(fetch, fetch.num_cached)
            return
        self._rates.asked(fetch.peer, time.monotonic() - fetch.asked_at)
        num_lacking = num_tokens - fetch.num_cached
        is_decided = fetch.request.tries_prefix_peer
        if not is_decided and not self._rates.is_quicker(fetch.peer, num_lacking, has_asked=True):
            self._refuse(request_id, params)
            self.counters.cheaper_to_compute += 1
            self._done(fetch, fetch.num_cached)
            return
        self._pull(fetch, params, min(num_tokens, self._most_tokens(fetch.request)))

    def _most_tokens(self, request: Request) -> int:
        block_size = self._kv_cache.least_block_size
        return (request.num_tokens - 1) // block_size * block_size

    def _pull(self, fetch: _Fetch, params: KVTransferParams, num_tokens: int) -> None:
        fetch.kv_transfer_params = params
        fetch.num_prompt_tokens = num_tokens
        fetch.started_at = time.monotonic()
        self._of_transfer[params.transfer_id] = fetch
        block_ids = self._kv_cache.get_block_ids(fetch.request_id)
        self._connector.update_state_after_alloc(fetch, block_ids, num_tokens - fetch.num_cached)
        self._connector.prompt_computed(fetch)

    def _refuse(self, request_id: str, params: KVTransferParams | None) -> None:
        """Lets the peer's blocks go."""
        if params is not None:
            self._connector.abort(_Nobody(request_id, params))

    def received(self, transfer_id: str) -> None:
        fetch = self._of_transfer.get(transfer_id)
        if fetch is None:
            return
        num_tokens = fetch.num_prompt_tokens - fetch.num_cached
        self._rates.pulled(fetch.peer, num_tokens, time.monotonic() - fetch.started_at)
        self.counters.pulls += 1
        self._keep(fetch, fetch.num_prompt_tokens)

    def failed(self, transfer_id: str, num_tokens_kept: int) -> None:
        """Goes on with a part: leading tokens whose KV is complete. No writer is left."""
        fetch = self._of_transfer.get(transfer_id)
        if fetch is None:
            return
        self.counters.failures += 1
        block_size = self._kv_cache.least_block_size
        self._keep(fetch, max(fetch.num_cached, num_tokens_kept // block_size * block_size))

    def _keep(self, fetch: _Fetch, num_tokens: int) -> None:
        self.counters.pulled_tokens += num_tokens - fetch.num_cached
        if fetch.request.num_cached_tokens is not None:
            fetch.request.num_cached_tokens += num_tokens - fetch.num_cached
        self._done(fetch, num_tokens)

    def _done(self, fetch: _Fetch, num_tokens: int) -> None:
        """Lets the request go on behind `num_tokens` tokens. What it waited for counts as queue."""
        request = fetch.request
        self._forget(fetch)
        request.num_computed_tokens = num_tokens
        request.first_scheduled_at = time.monotonic()
        self._ready.add(request)

    def _forget(self, fetch: _Fetch) -> None:
        del self._fetches[fetch.request_id]
        if fetch.kv_transfer_params is not None:
            del self._of_transfer[fetch.kv_transfer_params.transfer_id]

    def check_asked(self) -> None:
        """Gives up on peers that do not answer, before each step."""
        if not self._fetches:
            return
        latest = time.monotonic() - ASK_LIMIT_S
        for fetch in list(self._fetches.values()):
            if fetch.kv_transfer_params is None and fetch.asked_at < latest:
                self.counters.misses += 1
                self._done(fetch, fetch.num_cached)

    def request_ended(self, request: Request) -> None:
        """Takes the blocks of a request that pulls: they are free when nothing writes them."""
        fetch = self._fetches.get(request.request_id)
        if fetch is None:
            return
        self._forget(fetch)
        params = fetch.kv_transfer_params
        if params is not None and self._connector.abort(fetch):
            blocks = self._kv_cache.take_blocks(request.request_id)
            self._held.hold(params.transfer_id, blocks)

    def leftovers(self) -> list[str]:
        """Names everything that should not be there when no request is."""
        return [f"prefix for request {name}" for name in self._fetches]


@dataclass(slots=True)
class _Nobody:
    """Stands for a pull that never began."""

    request_id: str
    kv_transfer_params: KVTransferParams | None
    num_prompt_tokens: int = 0
