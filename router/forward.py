"""A streaming reverse proxy that may change its mind until the first byte.

1. place      the policy chooses nodes
2. attempt    `Exchange.open`; on failure, or a 429 or 503 from the node, back to 1 without it:
              at most `max_attempts` times and within the retry budget
3. relay      head and body to the client, as they come; no second attempt from here on
4. broken     if the node is lost now, a stream of events ends with an error event (and without
              `[DONE]`), any other answer with a cut connection: never a short answer that
              looks complete

A node is lost when its connection breaks, and also when neither the answer nor its load reports
have brought a word for long: a process that hangs keeps its connections open.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from starlette.types import Send

from router.errors import NodeLost, NodeUnreachable, NoNodeAvailable, RouterError, error_body
from router.event_buffer import EventBuffer
from router.exchange import Exchange
from router.metrics import RouterMetrics
from router.node import Node
from router.node_registry import NodeRegistry
from router.policy import Placement, Policy, PrefillChoice
from router.prefill_outcome import PrefillOutcome
from router.request_info import RequestInfo
from router.retry_budget import RetryBudget
from router.transport import Transport

logger = logging.getLogger(__name__)

_PASSED_HEADERS = ("content-type", "accept", "x-tandem-timeline", "traceparent", "tracestate")
_SILENCE_CHECK_S = 0.5
_NODE_FAULTS = (500, 502, 504)
_REFUSALS = (429, 503)
"""A node that is full or stops; another may have room."""


class AnswerBroken(Exception):
    """An answer ended early, after part of it had gone to the client."""


class Failure(StrEnum):
    """What went wrong at a decode node. `fault`: it answered, with a 500, 502 or 504."""

    UNREACHABLE = "unreachable"
    LOST = "lost"
    REFUSED = "refused"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """`headers` have lower-case names."""

    info: RequestInfo
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True, kw_only=True)
class Forwarder:
    policy: Policy
    registry: NodeRegistry
    transport: Transport
    metrics: RouterMetrics
    budget: RetryBudget
    max_attempts: int = 3
    node_api_key: str = ""
    _exchanges: set[Exchange] = field(default_factory=set)
    """Those that are open."""

    async def give_up_on_silent_nodes(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_SILENCE_CHECK_S)
            horizon = time.monotonic() - self.registry.patience.down_after_s
            for exchange in tuple(self._exchanges):
                node = exchange.placement.decode
                if exchange.heard_at < horizon and self.registry.is_down(node):
                    exchange.give_up()

    async def forward(self, request: ClientRequest, send: Send) -> int:
        """Has `request` answered through `send`; returns the status that the client got.

        Raises:
            RouterError: nothing has been sent yet; the caller answers with it.
            AnswerBroken: the client's connection must be cut.
        """
        started = time.monotonic()
        self.budget.add_request()
        exchange = await self._open(request)
        try:
            self.metrics.first_byte.observe(time.monotonic() - started)
            await self._relay(exchange, request.info, send)
        finally:
            exchange.close()
        return exchange.status

    # Attempts ----------------------------------------------------------------------------------

    async def _open(self, request: ClientRequest) -> Exchange:
        tried: list[Node] = []
        placement = self._place(request.info, tried)
        while True:
            exchange = Exchange(placement, self._exchanges)
            failure = await self._attempt(exchange, request)
            if failure is None:
                return exchange
            tried.append(placement.decode)
            following = self._next_placement(request.info, tried)
            if following is None:
                return _last_word(exchange, failure, len(tried))
            exchange.close()
            placement = following
            self.metrics.retries.labels(failure).inc()

    async def _attempt(self, exchange: Exchange, request: ClientRequest) -> Failure | None:
        decode = exchange.placement.decode
        headers = self._node_headers(request, exchange.placement)
        try:
            await exchange.open(self.transport, request.info.path, headers, request.body)
        except NodeUnreachable as error:
            return self._node_failed(decode, Failure.UNREACHABLE, str(error), request.info)
        except NodeLost as error:
            return self._node_failed(decode, Failure.LOST, str(error), request.info)
        except BaseException:
            exchange.close()
            raise
        if exchange.status in _REFUSALS:
            return Failure.REFUSED
        outcome = PrefillOutcome.from_headers(exchange.response_headers())
        self.policy.observe(request.info, exchange.placement, outcome)
        return None

    def _node_failed(
        self, node: Node, failure: Failure, reason: str, request: RequestInfo
    ) -> Failure:
        logger.warning(
            "request %s: decode node %s: %s (%s)", request.request_id, node.address, failure, reason
        )
        self.metrics.node_failures.labels(failure).inc()
        if self.registry.record_failure(node):
            self.metrics.ejections.labels(node.address.role).inc()
        return failure

    def _place(self, request: RequestInfo, tried: Sequence[Node]) -> Placement:
        placement = self.policy.place(request, tried)
        self.metrics.placements.labels(placement.choice, request.session_source).inc()
        return placement

    def _next_placement(self, request: RequestInfo, tried: Sequence[Node]) -> Placement | None:
        """Where to try again; None when the request has had its chances."""
        if len(tried) >= self.max_attempts:
            return None
        try:
            placement = self._place(request, tried)
        except RouterError:
            return None
        return placement if self.budget.try_take() else None

    def _node_headers(self, request: ClientRequest, placement: Placement) -> dict[str, str]:
        """Chosen ones of the client's headers, and ours. A client's own
        `x-prefiller-host-port` never passes: it would let it point nodes anywhere."""
        headers = {k: request.headers[k] for k in _PASSED_HEADERS if k in request.headers}
        headers["x-request-id"] = request.info.request_id
        if request.info.session_id:
            headers["x-session-id"] = request.info.session_id
        if placement.prefills or placement.choice is PrefillChoice.LOCAL:
            headers["x-prefiller-host-port"] = ",".join(
                node.address.target for node in placement.prefills
            )
        if self.node_api_key:
            headers["authorization"] = f"Bearer {self.node_api_key}"
        return headers

    # Relay -------------------------------------------------------------------------------------

    async def _relay(self, exchange: Exchange, request: RequestInfo, send: Send) -> None:
        headers = [*exchange.response_headers(), (b"x-request-id", request.request_id.encode())]
        await send({"type": "http.response.start", "status": exchange.status, "headers": headers})
        try:
            if exchange.is_event_stream:
                await _relay_events(exchange, send)
            else:
                await _relay_bytes(exchange, send)
        except NodeLost as error:
            self.metrics.broken_streams.inc()
            self._node_failed(exchange.placement.decode, Failure.LOST, str(error), request)
            if not exchange.is_event_stream:
                raise AnswerBroken(request.request_id) from error
            await _send_chunk(send, _error_event(), more=False)
        else:
            self._judge(exchange, request)

    def _judge(self, exchange: Exchange, request: RequestInfo) -> None:
        """A complete answer speaks for the node, unless it says that something broke there."""
        decode = exchange.placement.decode
        if exchange.status in _NODE_FAULTS:
            self._node_failed(decode, Failure.FAULT, f"status {exchange.status}", request)
        elif exchange.status not in _REFUSALS:
            self.registry.record_success(decode)


async def _relay_events(exchange: Exchange, send: Send) -> None:
    buffer = EventBuffer()
    chunk = exchange.first_chunk
    while chunk:
        if events := buffer.feed(chunk):
            await _send_chunk(send, events, more=True)
        chunk = await exchange.read_chunk()
    await _send_chunk(send, buffer.rest(), more=False)


async def _relay_bytes(exchange: Exchange, send: Send) -> None:
    chunk, more = exchange.first_chunk, True
    while more:
        following = await exchange.read_chunk()
        more = bool(following)
        await _send_chunk(send, chunk, more=more)
        chunk = following


async def _send_chunk(send: Send, chunk: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": more})


def _last_word(exchange: Exchange, failure: Failure, num_tried: int) -> Exchange:
    """A node's own refusal is the best answer there is; otherwise the router has to say it."""
    if failure is Failure.REFUSED:
        return exchange
    exchange.close()
    nodes = "The decode node" if num_tried == 1 else f"{num_tried} decode nodes"
    raise NoNodeAvailable(
        f"{nodes} did not answer, and there is no other to try. Try again shortly."
    )


def _error_event() -> bytes:
    body = error_body(
        "The node that was answering was lost. The answer so far is not complete.",
        "server_error",
        "node_lost",
    )
    return b"data: " + body + b"\n\n"
