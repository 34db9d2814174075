"""Forwards streams, and may change its mind as long as the client cannot notice.

0. client    takes the answer; a stream that is silent for long begins without one, and its status
             is 200 then whatever comes (`router.relay.client`)
1. begin     a decode node begins the answer (`router.relay.attempts.attempts`)
2. relay     to the client, as it comes (`router.relay.plain_relay`, `router.relay.journaled_relay`)
3. migrate   the node is lost or stops: another one goes on behind what the client has
             (`router.relay.migration`), back to 2
4. broken    nothing can: a stream of events ends with an error event (and without `[DONE]`), a
             plain answer with an error status if nothing of it was sent, else with a cut
             connection: never a short answer that looks complete
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from edge.http.event_loop import long_work
from router.admission.ticket import Ticket
from router.observe.metrics import RouterMetrics
from router.placement.policy import Placement
from router.relay.attempts.attempts import Attempts
from router.relay.attempts.exchange import Exchange
from router.relay.attempts.node_wait import NodeWait
from router.relay.client import Client, Clients
from router.relay.journaled_relay import JournaledRelay
from router.relay.migration import Migrations
from router.relay.plain_relay import PlainRelay
from router.relay.prefill_hold import PrefillHold
from router.request.client_request import ClientRequest


@dataclass(slots=True, kw_only=True)
class Forwarder:
    """Has requests answered. A request waits for a live node for `no_node_wait_s` at most, and
    never beyond its deadline."""

    attempts: Attempts
    migrations: Migrations
    metrics: RouterMetrics
    hold: PrefillHold
    clients: Clients = field(default_factory=Clients)
    no_node_wait_s: float = 5.0
    rng: random.Random = field(default_factory=random.Random)

    async def forward(self, request: ClientRequest, ticket: Ticket, client: Client) -> int:
        """Has `request` answered; returns the status that the client got.

        Raises:
            HttpError: no part of an answer has been sent; the caller answers with it.
            AnswerBroken: the client's connection must be cut.
        """
        exchange = await self._begin(request, ticket.check, ticket.time_left_s())
        ticket.first_byte()
        if exchange.status >= HTTPStatus.BAD_REQUEST:
            ticket.refused()
        info = request.info
        self.metrics.first_byte.observe(
            (info.model_name, info.model),
            request.trace.answered_at - request.trace.admitted_at,
            request.trace.context.exemplar(),
        )
        if exchange.is_journaled:
            relay = JournaledRelay(self.attempts, self.migrations, self.metrics, request, client)
            return await relay.run(exchange)
        return await PlainRelay(self.attempts, self.metrics, request, client).run(exchange)

    async def ask(self, request: ClientRequest, client: Client) -> int:
        """Has a request answered that generates nothing. Raises as `forward` does."""
        exchange = await self._begin(request, lambda placement: None, self.no_node_wait_s)
        return await PlainRelay(self.attempts, self.metrics, request, client).run(exchange)

    async def _begin(
        self, request: ClientRequest, check: Callable[[Placement], None], time_left_s: float
    ) -> Exchange:
        trace = request.trace
        trace.admitted_at = time.monotonic()
        await self.hold.wait(request.info, time_left_s)
        await long_work.pause(is_begun=True)
        now = time.monotonic()
        wait_s = min(self.no_node_wait_s, time_left_s - (now - trace.admitted_at))
        wait = NodeWait(self.attempts.registry, now + wait_s, self.rng)
        exchange = await self.attempts.begin(request, check, wait)
        trace.answered_at, outcome = time.monotonic(), exchange.outcome
        trace.decode_node = str(exchange.placement.decode.address)
        request.record.answered(
            exchange.asked_at,
            outcome.node,
            outcome.num_cached_tokens,
            outcome.queue_s,
            outcome.compute_s,
        )
        return exchange
