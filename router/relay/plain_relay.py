"""Relays a node's answer to the client, byte by byte, with nothing to fall back on."""

from __future__ import annotations

import time
from dataclasses import dataclass

from edge.http.error_forms import ErrorForm
from edge.http.errors import error_body
from router.errors import NodeLost
from router.observe.metrics import RouterMetrics
from router.relay.attempts.attempts import Attempts, Failure
from router.relay.attempts.exchange import Exchange
from router.relay.client import AnswerBroken, Client
from router.relay.event_buffer import EventBuffer
from router.request.client_request import ClientRequest

_LOST_STATUS = 500


@dataclass(slots=True)
class PlainRelay:
    """Relays answers without a journal: errors, and those of nodes that keep none."""

    attempts: Attempts
    metrics: RouterMetrics
    request: ClientRequest
    client: Client

    async def run(self, exchange: Exchange) -> int:
        """Returns the status. Raises `AnswerBroken`."""
        try:
            await self._relay(exchange)
        finally:
            exchange.close()
        return exchange.status

    async def _relay(self, exchange: Exchange) -> None:
        await self.client.start(exchange.status, exchange.response_headers())
        try:
            if exchange.is_event_stream:
                await self._relay_events(exchange)
            else:
                await self._relay_bytes(exchange)
        except NodeLost as error:
            info = self.request.info
            self.metrics.broken_streams.inc()
            decode = exchange.placement.decode
            self.attempts.node_failed(decode, Failure.LOST, str(error), info)
            self.request.record.broke("the decode node was lost")
            if not exchange.is_event_stream:
                raise AnswerBroken(info.request_id) from error
            await self.client.write(lost_event(info.path), more=False)
        else:
            self.attempts.judge(exchange, self.request.info)

    async def _relay_events(self, exchange: Exchange) -> None:
        buffer = EventBuffer()
        unsent: list[bytes] = []

        def take(chunk: bytes, now: float) -> bool:
            if events := buffer.feed(chunk):
                record = self.request.record
                record.event(record.num_pieces + 1, now, is_stream=True)
                if not self.client.write_now(events, now):
                    unsent.append(events)
            return not unsent

        is_over = not exchange.first_chunk
        if not is_over:
            take(exchange.first_chunk, time.monotonic())
        while not is_over:
            if unsent:
                await self.client.write(unsent.pop(), more=True)
            is_over = await exchange.stream(take)
        await self.client.write(buffer.rest(), more=False)

    async def _relay_bytes(self, exchange: Exchange) -> None:
        chunk, more = exchange.first_chunk, True
        while more:
            following = await exchange.read_chunk()
            more = bool(following)
            await self.client.write(chunk, more=more)
            chunk = following


def lost_event(path: str) -> bytes:
    """Returns the event that ends a stream whose node was lost, as the API at `path` has it."""
    form = ErrorForm.of_path(path)
    body = error_body(
        "The node that was answering was lost. The answer so far is not complete.",
        "server_error",
        "node_lost",
    )
    return form.event(form.translate(body, _LOST_STATUS))
