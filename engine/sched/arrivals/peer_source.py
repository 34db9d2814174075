"""Prefixes from peers: what a prompt lacks here and a named peer has is pulled, not computed.

    ASKED    the node server asks the peer (`take_asks`), and waits `ASK_LIMIT_S` at most
    COMING   the peer holds it, and it is sooner here than computed
    READY    behind whatever KV there is: all of it, a part, or nothing
    NOTHING  a part is of no use: windows and states are those of the whole

It asks once; whatever goes wrong, the prompt is computed behind the part that is here. Prompts are
named by hashes of their blocks, which begin with the tenant's salt, so no tenant is given what
another one computed. How much of it the peer has, in all groups of layers, the peer finds itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count

from engine.contracts.messages import KVTransferResult, PrefixAsk
from engine.contracts.request import Request
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.arrivals.arrival import ArrivalState, TransferArrival, WriterKey
from engine.sched.arrivals.arrivals import Arrivals
from engine.sched.arrivals.pull_rates import PullRates
from engine.sched.arrivals.source_rate import PullDecision
from kv_transfer.base import KVConnectorScheduler
from kv_transfer.metadata import KVTransferParams, TransferStats

ASK_LIMIT_S = 2.0
_ASKS = count(1)
"""Numbers of asks: a late answer is none to a later request of the same id."""


@dataclass(slots=True, eq=False)
class PeerArrival(TransferArrival):
    """A prefix, as a connector reads a request: `num_prompt_tokens` of it."""

    peer: str = ""
    ask: int = 0
    num_prompt_tokens: int = 0
    kv_transfer_params: KVTransferParams | None = None
    started_at: float = 0.0

    @property
    def request_id(self) -> str:
        return self.request.request_id


@dataclass(slots=True)
class PeerCounters:
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


class PeerSource:
    """The prefix caches of the peers that requests name."""

    finds_certainly, writes_by_token = False, True

    def __init__(
        self,
        arrivals: Arrivals,
        connector: KVConnectorScheduler,
        kv_cache: KVCacheManager,
        rates: PullRates,
        *,
        is_on: bool,
    ) -> None:
        self.is_on = is_on
        self.counters = PeerCounters()
        self._arrivals = arrivals
        self._connector = connector
        self._kv_cache = kv_cache
        self._rates = rates
        self._asks: list[PrefixAsk] = []

    # As a source ------------------------------------------------------------------------------

    def find(self, request: Request, num_computed_tokens: int) -> int:
        """At least one token is left to be computed."""
        if not request.prefix_peer:
            return 0
        count = self._most_tokens(request) - num_computed_tokens
        if count <= 0:
            request.prefix_peer = ""
        elif not request.tries_prefix_peer and not self._is_worth_asking(request, count):
            request.prefix_peer = ""
            self.counters.cheaper_to_compute += 1
        return count if request.prefix_peer else 0

    def _most_tokens(self, request: Request) -> int:
        return self._kv_cache.behind.last_end(request.num_tokens - 1)

    def _is_worth_asking(self, request: Request, num_tokens: int) -> bool:
        """A try is decided once, or the next look at the request, as before the peer answers and
        after, would find the peer slower and the try spent."""
        verdict = self._rates.verdict(request.prefix_peer, num_tokens)
        request.tries_prefix_peer = verdict in (PullDecision.ON_TRUST, PullDecision.ON_CREDIT)
        return verdict.is_to_take

    def begin(self, request: Request, num_computed_tokens: int, num_tokens: int) -> None:
        stop = num_computed_tokens + num_tokens
        chains = self._kv_cache.behind.chains(request, stop)
        peer, request.prefix_peer = request.prefix_peer, ""
        arrival = PeerArrival(request, self, peer=peer, ask=next(_ASKS))
        self._arrivals.begin(arrival, num_computed_tokens, num_tokens, ArrivalState.ASKED)
        self._asks.append(PrefixAsk(request.request_id, arrival.ask, peer, chains))

    def stop(self, arrival: PeerArrival) -> WriterKey | None:
        is_coming = arrival.state is ArrivalState.COMING
        return arrival.transfer if is_coming and self._connector.abort(arrival) else None

    def received(self, arrival: PeerArrival, stats: TransferStats) -> KVTransferResult | None:
        seconds = time.monotonic() - arrival.started_at
        self._rates.pulled(arrival.peer, arrival.num_coming, seconds)
        self.counters.pulls += 1
        self._keep(arrival, arrival.num_prompt_tokens)
        return None

    def failed(
        self, arrival: PeerArrival, num_tokens_kept: int, failure: KVTransferResult
    ) -> KVTransferResult | None:
        self.counters.failures += 1
        seconds = time.monotonic() - arrival.started_at
        self._rates.failed(arrival.peer, arrival.num_coming, seconds)
        kv_cache, stop = self._kv_cache, arrival.num_before + arrival.num_coming
        num_tokens = max(arrival.num_before, kv_cache.behind.last_end(num_tokens_kept))
        if kv_cache.can_continue(num_tokens, stop):
            self._keep(arrival, num_tokens)
        else:
            self._arrivals.failed(arrival)
        return None

    # What peers say ---------------------------------------------------------------------------

    def take_asks(self) -> list[PrefixAsk]:
        """Returns what the node server has to ask peers now."""
        asks, self._asks = self._asks, []
        return asks

    def answered(
        self, request_id: str, number: int, params: KVTransferParams | None, num_tokens: int
    ) -> None:
        """Goes on after a peer's answer to the ask of this number: it holds `num_tokens` from the
        prompt's beginning for `params`. None: nothing."""
        arrival = self._arrivals.get(request_id)
        if (
            not isinstance(arrival, PeerArrival)
            or arrival.ask != number
            or arrival.state is not ArrivalState.ASKED
        ):
            self._refuse(request_id, params)
            return
        num_lacking = num_tokens - arrival.num_before
        if params is None or not self._is_wanted(arrival, num_tokens):
            self._refuse(request_id, params)
            self.counters.misses += 1
            self._arrivals.here(arrival, arrival.num_before)
            return
        self._rates.asked(arrival.peer, time.monotonic() - arrival.asked_at)
        is_decided = arrival.request.tries_prefix_peer
        if not is_decided and not self._rates.is_quicker(arrival.peer, num_lacking, has_asked=True):
            self._refuse(request_id, params)
            self.counters.cheaper_to_compute += 1
            self._arrivals.here(arrival, arrival.num_before)
            return
        if self._arrivals.come(arrival, num_tokens, is_by_token=not self._takes_blocks(params)):
            self._pull(arrival, params, num_tokens)
        else:
            self._refuse(request_id, params)

    def _is_wanted(self, arrival: PeerArrival, num_tokens: int) -> bool:
        """Returns whether a prefix of this length is more than is here, and one that was asked
        for."""
        stop = arrival.num_before + arrival.num_coming
        is_end = self._kv_cache.behind.last_end(num_tokens) == num_tokens
        return is_end and arrival.num_before < num_tokens <= stop

    def _takes_blocks(self, params: KVTransferParams) -> bool:
        """Returns whether whole blocks come, of windows too, so that others find them here."""
        peer = params.peer
        fits = peer is not None and self._kv_cache.fits_into_blocks(peer.layout)
        return params.is_prefix and fits

    def _pull(self, arrival: PeerArrival, params: KVTransferParams, num_tokens: int) -> None:
        self._arrivals.name_transfer(arrival, params.name)
        arrival.kv_transfer_params = params
        arrival.num_prompt_tokens = num_tokens
        arrival.started_at = time.monotonic()
        block_ids = self._kv_cache.get_block_ids(arrival.request_id)
        self._connector.update_state_after_alloc(arrival, block_ids, arrival.num_coming)
        self._connector.prompt_computed(arrival)

    def _refuse(self, request_id: str, params: KVTransferParams | None) -> None:
        """Lets the peer's blocks go."""
        if params is not None:
            self._connector.abort(_Nobody(request_id, params))

    def _keep(self, arrival: PeerArrival, num_tokens: int) -> None:
        num_kept, request = num_tokens - arrival.num_before, arrival.request
        self.counters.pulled_tokens += num_kept
        if request.num_cached_tokens is not None:
            request.num_cached_tokens += num_kept
        self._arrivals.here(arrival, num_tokens)

    def check(self) -> None:
        """Gives up on peers that do not answer, before each step."""
        if not self._arrivals.any_in(ArrivalState.ASKED):
            return
        latest = time.monotonic() - ASK_LIMIT_S
        for arrival in self._arrivals.in_state(ArrivalState.ASKED):
            if isinstance(arrival, PeerArrival) and arrival.asked_at < latest:
                self.counters.misses += 1
                self._arrivals.here(arrival, arrival.num_before)


@dataclass(slots=True)
class _Nobody:
    """Stands for a pull that never began."""

    request_id: str
    kv_transfer_params: KVTransferParams | None
    num_prompt_tokens: int = 0
