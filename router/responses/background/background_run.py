"""Works on one response in the background.

1. queued        its row is in the store, and its first two events; nothing has begun an answer
2. in_progress   a node answers. Events are here at once, and in the store a little later
3. over          the store has the response and its last event, which followers get after that
-  given up      the row has another owner now, or is finished: it was cancelled or deleted. The
                 work on the nodes ends

A refusal for want of room is tried again for `_PATIENCE_S`, as long as nothing was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from edge.http.errors import HttpError
from router.request.tenants import Tenant
from router.responses.background.detached_call import DetachedAnswer, ask
from router.responses.bodies.json_fields import UNREADABLE, fields_of, with_fields
from router.responses.bodies.response_bodies import (
    error_code,
    event_of,
    failed_body,
    split_output,
    whole,
)
from router.responses.bodies.turn import Turn
from router.responses.kept_answer import data_of
from router.responses.kept_responses import KeptResponses
from router.store import responses
from router.store.errors import StoreUnavailable
from router.store.events import put_events
from router.store.items import Item
from router.store.responses import ResponseRow
from router.store.sql.transaction import Transaction

logger = logging.getLogger(__name__)

_PATIENCE_S = 600.0
_PAUSE_S = 1.0
_NO_ROOM = (429, 503)


class GivenUp(Exception):
    """The response is not this router's any more."""


@dataclass(slots=True, kw_only=True)
class BackgroundRun:
    """Is the work on one response. `events` are all that followers may have, by number; what is new
    is written after every `pause_s()` seconds."""

    kept: KeptResponses
    api: ASGIApp
    turn: Turn
    row: ResponseRow
    tenant: Tenant
    headers: Mapping[str, str]
    events: list[bytes]
    pause_s: Callable[[], float]
    is_over: bool = False
    is_ending: bool = False
    num_stored: int = field(init=False)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _has_begun: bool = False

    def __post_init__(self) -> None:
        self.num_stored = len(self.events)

    async def run(self) -> None:
        """Works until the response is over, or given up."""
        try:
            async with asyncio.TaskGroup() as group:
                flushing = group.create_task(self._keep_flushing())
                last = await self._answer()
                flushing.cancel()
            await self._finish(*last)
        except* GivenUp:
            pass
        except* Exception:
            logger.exception("background response %s failed", self.row.id)
            with contextlib.suppress(GivenUp):
                await self._finish(*self._failed("server_error", "The router failed on it."))
        finally:
            self.is_over = True
            self._tell()

    async def wait(self, num_known: int, timeout_s: float) -> None:
        """Waits until there are more events than that, or none will come, but not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self.events) <= num_known and not self.is_over:
                    changed = self.changed
                    await changed.wait()

    async def _answer(self) -> tuple[str, bytes, list[Item]]:
        """Returns status, body and output of the response."""
        until = time.monotonic() + _PATIENCE_S
        try:
            body = self.turn.node_body(self.kept.limits.max_body_bytes, is_stream=True)
        except HttpError as error:
            return self._failed(error_code(int(error.status)), error.message)
        while True:
            answer = DetachedAnswer(self._take)
            told = self.turn.kept_header(num_events=2).header()
            await ask(self.api, answer.send, body, self.headers, self.tenant, told)
            if answer.last:
                with contextlib.suppress(*UNREADABLE, KeyError):
                    return split_output(bytes(fields_of(data_of(answer.last))["response"]))
            is_refused = answer.status in _NO_ROOM and not self._has_begun
            if not is_refused or time.monotonic() > until:
                return self._failed(error_code(answer.status), answer.message)
            await asyncio.sleep(max(_PAUSE_S, answer.retry_after_s))

    def _failed(self, code: str, message: str) -> tuple[str, bytes, list[Item]]:
        return "failed", failed_body(self.row.body, code, message), []

    def _take(self, events: Sequence[bytes]) -> None:
        self._has_begun = True
        self.events += events
        self._tell()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _keep_flushing(self) -> None:
        """Writes what has come, until cancelled. Raises `GivenUp`."""
        is_noted = False
        while True:
            await asyncio.sleep(self.pause_s())
            has_news = self.row.is_stream and self.num_stored < len(self.events)
            if not self._has_begun or (is_noted and not has_news):
                continue
            with contextlib.suppress(StoreUnavailable):
                await self._flush()
                is_noted = True

    async def _flush(self) -> None:
        body = with_fields(self.row.body, status="in_progress")
        new = self.events[self.num_stored :] if self.row.is_stream else []

        def write(transaction: Transaction) -> None:
            if not responses.begin(transaction, self.row, body):
                raise GivenUp
            put_events(transaction, self.row, self.num_stored, new)

        await self.kept.database.write(write)
        self.num_stored += len(new)

    async def _finish(self, status: str, body: bytes, output: list[Item]) -> None:
        """Ends the response in the store, however long that takes, and then for followers."""
        self.is_ending = True
        last = event_of(f"response.{status}", len(self.events), whole(body, output))
        new = [*self.events[self.num_stored :], last] if self.row.is_stream else []

        def write(transaction: Transaction) -> None:
            if not responses.finish(transaction, self.row, status, body, output):
                raise GivenUp
            put_events(transaction, self.row, self.num_stored, new)
            self.kept.add_turn(transaction, self.turn, status, output)

        while True:
            with contextlib.suppress(StoreUnavailable):
                await self.kept.database.write(write)
                break
            await asyncio.sleep(_PAUSE_S)
        self.kept.locks.discard(self.turn.id)
        self.events.append(last)
