"""Lets another decode node go on with an answer whose node is lost or stops.

1. place     anywhere but there, on a node of the same model and KV: the same tokens would follow
2. attempt   the original body and the journal so far. Refused or lost: back to 1 without it
3. wait      nothing is left to try: until a node comes back, or for a moment, because one may get
             room; back to 1 with all
4. go on     the node has accepted: the answer continues behind the last entry of the journal
-  give up   after `timeout_s`, or when the request or the router has used up its migrations
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from edge.http.errors import HttpError
from router.errors import Overloaded
from router.models.per_model import PerModel
from router.nodes.node import Node
from router.nodes.registry import NodeRegistry
from router.placement.policy import Placement
from router.relay.attempts.attempts import Attempts, Failure
from router.relay.attempts.exchange import Exchange
from router.relay.attempts.node_wait import NodeWait
from router.relay.attempts.retry_budget import RetryBudget
from router.relay.journal import Journal
from router.request.client_request import ClientRequest


@dataclass(slots=True, kw_only=True)
class Migrations:
    """Moves answers. A budget is shared by all requests to one model, `max_per_request` bounds
    each."""

    attempts: Attempts
    registry: NodeRegistry
    budgets: PerModel[RetryBudget]
    max_per_request: int = 3
    timeout_s: float = 30.0
    rng: random.Random = field(default_factory=random.Random)

    async def resume(
        self, request: ClientRequest, journal: Journal, lost: Placement, num_before: int
    ) -> Exchange | None:
        """Returns the exchange that goes on, or None. `num_before` counts migrations so far."""
        if num_before >= self.max_per_request or journal.is_too_long:
            return None
        wait = NodeWait(self.registry, time.monotonic() + self.timeout_s, self.rng)
        tried: list[Node] = [lost.decode]
        while True:
            placement = self._place(request, lost.decode.fingerprint, tried)
            if placement is not None:
                if not self.budgets.of(request.info.model).try_take():
                    return None
                exchange = await self._attempt(request, journal, placement)
                if exchange is not None:
                    return exchange
                tried.append(placement.decode)
                continue
            if not await wait.pause():
                return None
            tried = []

    def _place(
        self, request: ClientRequest, fingerprint: str, tried: list[Node]
    ) -> Placement | None:
        """Returns None when there is nothing. Nodes of another model or KV layout are added to
        `tried`."""
        while True:
            try:
                placement = self.attempts.place(request, tried)
            except HttpError:
                return None
            if placement.decode.fingerprint == fingerprint:
                return placement
            tried.append(placement.decode)

    async def _attempt(
        self, request: ClientRequest, journal: Journal, placement: Placement
    ) -> Exchange | None:
        attempts = self.attempts
        number = journal.next_number
        body, headers = journal.resume(request.body, attempts.node_headers(request, placement))
        exchange = attempts.exchange(placement)
        exchange.num_before = number
        try:
            failure = await attempts.attempt(exchange, request.info, headers, body)
        except Overloaded:  # This router has no room for a connection now.
            return None
        if failure is None and exchange.is_journaled and exchange.journal_number == number:
            return exchange
        if failure is None:
            reason = f"status {exchange.status} to a resumed request"
            attempts.node_failed(placement.decode, Failure.FAULT, reason, request.info)
        request.trace.calls.end(failure or Failure.FAULT)
        exchange.close()
        return None
