"""Owns the responses that this router works on in the background, by leases in the store.

1. start      a row is added with this router as its owner, and a run begins
2. renewed    every third of a lease, all at once, with the locks of conversations
3. given up   a row has another owner, or is finished: its run is cancelled, within `_LOOK_S`
4. taken      of a router that renews no more: answered again, from its row, if nothing can have
              seen events of it; else it ends as failed, and says why
5. drained    runs have the time that a drain has, and none is taken of other routers
6. closed     what is left is free for other routers at once

Leases are judged by the time of the database (`router.store.sql.shared_clock`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec
from starlette.types import ASGIApp

from edge.http.errors import HttpError
from router.errors import Overloaded
from router.request.tenants import Tenant
from router.responses.background.background_run import BackgroundRun
from router.responses.bodies.input_items import items_of_input
from router.responses.bodies.json_fields import encode, raw_list
from router.responses.bodies.response_bodies import begun_body, event_of, failed_body, whole
from router.responses.bodies.state_fields import StateFields
from router.responses.bodies.turn import Turn
from router.responses.kept_responses import KeptResponses
from router.store import conversations, responses
from router.store.errors import StoreUnavailable
from router.store.events import num_events, put_events
from router.store.items import Item, items_of
from router.store.responses import ResponseRow
from router.store.sql.transaction import Transaction

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_FLUSH_S = 0.25
_WRITES_PER_S = 50
"""Most transactions a second that runs write events in: requests need the database, too."""
_NUM_TAKEN = 16
_MAX_ATTEMPTS = 3
_NUM_FIRST_EVENTS = 2


class _Request(msgspec.Struct):
    """Is what another router needs besides the row and its items."""

    fields: dict[str, msgspec.Raw]
    headers: dict[str, str]
    created_at: float


@dataclass(slots=True, kw_only=True)
class BackgroundRuns:
    """Starts runs and watches over them. `api` answers requests; `tenants` gives those that
    exist."""

    kept: KeptResponses
    api: ASGIApp
    tenants: Callable[[], Mapping[str, Tenant]]
    drain_s: float
    rng: random.Random = field(default_factory=random.Random)
    owner: str = field(default_factory=lambda: secrets.token_hex(8))
    _drain_until: float = 0.0
    _is_draining: bool = False
    _runs: dict[tuple[str, str], BackgroundRun] = field(default_factory=dict)
    _tasks: dict[tuple[str, str], asyncio.Task[None]] = field(default_factory=dict)

    @property
    def num_running(self) -> int:
        return len(self._runs)

    def find(self, tenant: str, name: str) -> BackgroundRun | None:
        """Returns the run of a response, if it is here."""
        return self._runs.get((tenant, name))

    def check_room(self) -> None:
        """Raises `Overloaded` where no further run may begin."""
        if len(self._runs) >= self.kept.limits.max_background:
            raise Overloaded(
                "The router works on as many responses in the background as it may. Try again "
                "later."
            )

    async def start(self, turn: Turn, tenant: Tenant, headers: Mapping[str, str]) -> BackgroundRun:
        """Keeps a response that is queued, and begins to work on it. Raises `StoreUnavailable`."""
        body = begun_body(turn, "queued")
        rest = {k: v for k, v in turn.state.fields.items() if k != "input"}
        request = _Request(rest, dict(headers), turn.created_at)
        row = ResponseRow(
            tenant=turn.tenant,
            id=turn.id,
            status="queued",
            body=body,
            expires_at=self.kept.expires_at(),
            previous=turn.state.previous,
            conversation=turn.state.conversation,
            is_background=True,
            is_stream=turn.state.is_stream,
            request=encode(request),
            owner=self.owner,
            lease_until=self._lease_end(),
            attempt=1,
        )
        queued = whole(body, [])
        names = "response.created", "response.queued"
        events = [event_of(name, i, queued) for i, name in enumerate(names)]

        def write(transaction: Transaction) -> None:
            responses.add_response(transaction, row, turn.items)
            if row.is_stream:
                put_events(transaction, row, 0, events)

        await self.kept.database.write(write)
        return self._begin(turn, row, tenant, headers, events)

    def stop(self, tenant: str, name: str) -> None:
        """Ends the work on a response that is finished in the store."""
        if (task := self._tasks.get((tenant, name))) is not None:
            task.cancel()

    async def watch(self) -> None:
        """Watches leases until cancelled."""
        renewed_at = 0.0
        lease_s = self.kept.limits.lease_s
        while True:
            await asyncio.sleep(min(_LOOK_S, lease_s / 3) * self.rng.uniform(0.9, 1.1))
            with contextlib.suppress(StoreUnavailable):
                await self._give_up_lost()
                now = self.kept.clock()
                if not 0 <= now - renewed_at < lease_s / 3:
                    await self._renew()
                    if not self._is_draining:
                        await self._take_abandoned()
                    renewed_at = now

    def begin_drain(self) -> None:
        """Has the time of a drain run from now on."""
        self._drain_until = time.monotonic() + self.drain_s

    async def drain(self) -> None:
        """Waits for runs while the drain lasts."""
        self._is_draining = True
        left_s = max(0.0, self._drain_until - time.monotonic())
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=left_s)

    async def close(self) -> None:
        """Cuts runs off, and leaves them to other routers."""
        left = list(self._tasks.values())
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if left:
            with contextlib.suppress(StoreUnavailable):
                await self.kept.database.write(lambda one: responses.renew(one, self.owner, 0.0))

    def _begin(
        self,
        turn: Turn,
        row: ResponseRow,
        tenant: Tenant,
        headers: Mapping[str, str],
        events: list[bytes],
    ) -> BackgroundRun:
        run = BackgroundRun(
            kept=self.kept,
            api=self.api,
            turn=turn,
            row=row,
            tenant=tenant,
            headers=headers,
            events=events,
            pause_s=lambda: max(_FLUSH_S, len(self._runs) / _WRITES_PER_S),
        )
        key = (row.tenant, row.id)
        self._runs[key] = run
        task = self._tasks[key] = asyncio.create_task(run.run())

        def ended(_: asyncio.Task[None]) -> None:
            del self._runs[key], self._tasks[key]
            self.kept.locks.discard(row.id)

        task.add_done_callback(ended)
        return run

    def _lease_end(self) -> float:
        return self.kept.clock() + self.kept.limits.lease_s

    async def _give_up_lost(self) -> None:
        if not self._runs:
            return
        known = {(*key, run.row.attempt) for key, run in self._runs.items()}
        owned = await self.kept.database.read(lambda one: responses.owned_by(one, self.owner))
        for tenant, name, attempt in known - owned:
            run = self.find(tenant, name)
            # One that has just ended is in the store already.
            if run is not None and run.row.attempt == attempt and not run.is_ending:
                self.stop(tenant, name)

    async def _renew(self) -> None:
        if not self._runs and not self.kept.locks:
            return
        until, locks = self._lease_end(), list(self.kept.locks)

        def write(transaction: Transaction) -> None:
            responses.renew(transaction, self.owner, until)
            conversations.renew_locks(transaction, locks, until)

        await self.kept.database.write(write)

    async def _take_abandoned(self) -> None:
        database, clock = self.kept.database, self.kept.clock
        for row in await database.read(lambda one: responses.abandoned(one, clock(), _NUM_TAKEN)):
            taken = await database.write(partial(self._claim, row))
            if taken is not None:
                logger.warning("background response %s: its router is gone", taken.id)
                await self._go_on(taken)

    def _claim(self, row: ResponseRow, transaction: Transaction) -> ResponseRow | None:
        return responses.claim(transaction, row, self.owner, self._lease_end())

    async def _go_on(self, row: ResponseRow) -> None:
        """Answers a response of another router, or ends it."""

        def look(transaction: Transaction) -> tuple[int, list[Item]]:
            items = items_of(transaction, row.tenant, [row.id])[row.id]
            return num_events(transaction, row.tenant, row.id), items

        told, items = await self.kept.database.read(look)
        tenant = self.tenants().get(row.tenant)
        why = ""
        if told > _NUM_FIRST_EVENTS:
            why = "The router that streamed it is gone, and its answer cannot be repeated."
        elif row.attempt > _MAX_ATTEMPTS:
            why = f"{row.attempt - 1} routers worked on it, and are gone."
        elif tenant is None:
            why = "Its tenant is not known any more."
        if tenant is None or why:
            await self._end(row, told, why)
            return
        request = msgspec.json.decode(row.request, type=_Request)
        given = raw_list([item.data for item in items])
        turn = Turn(
            tenant=row.tenant,
            state=StateFields(
                fields={**request.fields, "input": given},
                previous=row.previous,
                conversation=row.conversation,
                background=True,
                is_stream=row.is_stream,
            ),
            id=row.id,
            created_at=request.created_at,
            items=tuple(items_of_input(bytes(given))),
        )
        try:
            turn = await self.kept.again(turn)
        except StoreUnavailable:
            raise
        except HttpError as error:
            await self._end(row, told, error.message)
            return
        queued = whole(row.body, [])
        names = "response.created", "response.queued"
        events = [event_of(name, i, queued) for i, name in enumerate(names)]
        run = self._begin(turn, row, tenant, request.headers, events)
        run.num_stored = told

    async def _end(self, row: ResponseRow, told: int, why: str) -> None:
        body = failed_body(row.body, "server_error", why)
        event = event_of("response.failed", told, whole(body, []))

        def write(transaction: Transaction) -> None:
            if responses.finish(transaction, row, "failed", body, []):
                if row.is_stream:
                    put_events(transaction, row, told, [event])
                conversations.unlock(transaction, row.tenant, row.conversation, row.id)

        await self.kept.database.write(write)
