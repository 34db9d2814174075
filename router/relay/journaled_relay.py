"""Relays a node's answer to the client, and the next node's when that one is lost.

    node ──bytes──▶ EventBuffer ──events──▶ Journal ──the client's part──▶ Outlet ──▶ client
                                               │
                             lost, or stops:   └──▶ Migrations ──▶ the next node, from the left

Giving an event to the outlet is the point of no return: its entries are in the journal then, and
whatever node goes on begins behind them.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum

from edge.http.answers.answer_times import read_answer_times
from edge.http.event_loop import long_work
from router.errors import NodeLost
from router.observe.metrics import RouterMetrics
from router.relay.attempts.attempts import Attempts, Failure
from router.relay.attempts.exchange import Exchange
from router.relay.client import Client, Headers
from router.relay.event_buffer import EventBuffer
from router.relay.journal import Journal, JournalEnd
from router.relay.migration import Migrations
from router.relay.move_times import MoveTimes
from router.relay.plain_relay import lost_event
from router.request.client_request import ClientRequest

logger = logging.getLogger(__name__)

_MAX_EVENT_BYTES = 64 << 20
"""A whole plain answer is one event."""
_UNAVAILABLE = 503
_DATA = b"data: "
_DONE = b"data: [DONE]\n\n"


class Interruption(StrEnum):
    """Says why a node cannot end the answer that it gives. With `handed_over` it says so itself."""

    LOST = "lost"
    HANDED_OVER = "handed_over"
    GAP = "gap"


_INTERRUPTIONS = {
    JournalEnd.HANDED_OVER: Interruption.HANDED_OVER,
    JournalEnd.GAP: Interruption.GAP,
}


class Outlet(ABC):
    """Gives the client what it asked for: a stream, or a whole body."""

    def __init__(self, client: Client, headers: Headers) -> None:
        self._client = client
        self._headers = headers

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    def write_now(self, events: bytes, now: float) -> bool:
        """Writes at once, at monotonic seconds. Returns False, and has written nothing, where
        `write` is needed."""

    @abstractmethod
    async def write(self, events: bytes) -> None: ...

    @abstractmethod
    async def end(self, error: bytes, status: int) -> int:
        """Ends the answer. `error` is the event that says why the answer is not complete, or
        nothing; `status` belongs to it. Returns the status that the client got."""


class StreamOutlet(Outlet):
    async def start(self) -> None:
        await self._client.start(200, self._headers)

    def write_now(self, events: bytes, now: float) -> bool:
        return self._client.write_now(events, now)

    async def write(self, events: bytes) -> None:
        await self._client.write(events, more=True)

    async def end(self, error: bytes, status: int) -> int:
        await self._client.write(error, more=False)
        return 200


class BodyOutlet(Outlet):
    """Sends nothing before all is there."""

    def __init__(self, client: Client, headers: Headers) -> None:
        super().__init__(client, headers)
        self._body = b""

    async def start(self) -> None:
        """Waits: the status is not known before the end."""

    def write_now(self, events: bytes, now: float) -> bool:
        """Keeps the last body: a node that goes on with an answer sends all of it."""
        if events != _DONE:
            self._body = events
        return True

    async def write(self, events: bytes) -> None:
        """Is never needed."""

    async def end(self, error: bytes, status: int) -> int:
        _, _, body = (error or self._body.removesuffix(_DONE)).partition(_DATA)
        body = body.rstrip(b"\n")
        headers = [*self._headers, (b"content-length", str(len(body)).encode())]
        if status == _UNAVAILABLE:
            headers.append((b"retry-after", b"1"))
        await self._client.start(status, headers)
        await self._client.write(body, more=False)
        return status


@dataclass(slots=True)
class JournaledRelay:
    """Relays one request's answer, over all nodes that give it."""

    attempts: Attempts
    migrations: Migrations
    metrics: RouterMetrics
    request: ClientRequest
    client: Client
    journal: Journal = field(default_factory=Journal)
    _last_event_at: float = field(default_factory=time.monotonic)
    _move: MoveTimes | None = None
    """One that the client waits for."""

    async def run(self, exchange: Exchange) -> int:
        """Returns the status that the client got. Raises `AnswerBroken`."""
        kind = StreamOutlet if exchange.is_event_stream else BodyOutlet
        outlet = kind(self.client, exchange.response_headers())
        num_migrations = 0
        while True:
            try:
                if not num_migrations:
                    await outlet.start()
                interruption = await self._pump(exchange, outlet)
            finally:
                exchange.close()
            if interruption is None:
                return await self._end(exchange, outlet)
            following = await self._migrate(exchange, interruption, num_migrations)
            if following is None:
                path = self.request.info.path
                return await outlet.end(self.journal.error or lost_event(path), _UNAVAILABLE)
            exchange = following
            num_migrations += 1

    async def _pump(self, exchange: Exchange, outlet: Outlet) -> Interruption | None:
        """Relays until the answer is over (None), or another node has to go on."""
        journal = self.journal
        buffer = EventBuffer(_MAX_EVENT_BYTES)
        unsent = b""

        def take(chunk: bytes, now: float) -> bool:
            """Passes events on. Says no when the client has to be waited for, or another node."""
            nonlocal unsent
            if events := buffer.feed(chunk):
                number = journal.next_number
                passed = journal.take(events)
                if journal.next_number > number:
                    exchange.progress_at = now
                if passed:
                    self._note_event(exchange, now)
                    if not outlet.write_now(passed, now):
                        unsent = passed
                        return False
                return journal.end is None
            return True

        is_over = not exchange.first_chunk
        if not is_over:
            take(exchange.first_chunk, time.monotonic())
        try:
            while True:
                if unsent:
                    await outlet.write(unsent)
                    unsent = b""
                if journal.end is not None:
                    return _INTERRUPTIONS.get(journal.end)
                if is_over:
                    break
                is_over = await exchange.stream(take)
        except NodeLost as error:
            self._lost(exchange, str(error))
            return Interruption.LOST
        self._lost(exchange, "it ended the answer too early")
        return Interruption.LOST

    async def _end(self, exchange: Exchange, outlet: Outlet) -> int:
        await long_work.pause(is_begun=True)
        self.request.record.times = read_answer_times(self.journal.times)
        if self.journal.end is JournalEnd.FAILED:
            if self.journal.error_status >= 500:
                self._broke("the decode node gave up")
            return await outlet.end(self.journal.error, self.journal.error_status)
        self.attempts.finished(exchange, self.request.info, self.journal.next_number)
        return await outlet.end(b"", 200)

    async def _migrate(
        self, lost: Exchange, interruption: Interruption, num_before: int
    ) -> Exchange | None:
        if interruption is Interruption.GAP:
            self._lost(lost, "entries of its journal are missing, or cannot be read")
        elif interruption is Interruption.HANDED_OVER:
            self.attempts.note(lost.placement.decode, interruption)
        move = self._move or MoveTimes(self._last_event_at, time.monotonic())
        following = await self.migrations.resume(
            self.request, self.journal, lost.placement, num_before
        )
        if following is None:
            self._broke(f"no other decode node could go on: {interruption}")
        else:
            self.request.trace.num_moves += 1
            node = str(following.placement.decode.address)
            self.request.record.moved(interruption, node, following.asked_at)
            self.metrics.migrations.labels(interruption).inc()
            move.accepted(following.asked_at)
            self._move = move
        return following

    def _broke(self, why: str) -> None:
        self.metrics.broken_streams.inc()
        self.request.record.broke(why)

    def _note_event(self, exchange: Exchange, now: float) -> None:
        self._last_event_at = now
        is_stream = exchange.is_event_stream
        self.request.record.event(self.journal.next_number, now, is_stream=is_stream)
        if self._move is not None:
            logger.info(
                "request %s goes on at %s: %s",
                self.request.info.request_id,
                exchange.placement.decode.address,
                self._move.observe(self.metrics.move_seconds),
            )
            self._move = None

    def _lost(self, exchange: Exchange, reason: str) -> None:
        decode = exchange.placement.decode
        self.attempts.node_failed(decode, Failure.LOST, reason, self.request.info)
