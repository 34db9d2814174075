"""Streams the events of a background response to a client, from any of them on.

Where the response is worked on here, events come as they do; else from the store, which has them a
little later. A stream that ends without its last event belongs to a response that was cancelled or
deleted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from edge.http.answers.heartbeats import KEEP_ALIVE
from router.responses.background.background_run import BackgroundRun
from router.responses.kept_responses import KeptResponses
from router.store.errors import StoreUnavailable
from router.store.events import events_from
from router.store.responses import ResponseRow, find_response
from router.store.sql.transaction import Transaction

_LOOK_S = 0.25
_IDLE_S = 1.0


async def run_events(run: BackgroundRun, first: int, keepalive_s: float) -> AsyncIterator[bytes]:
    """Gives the events of a run from the number `first` on, as they come."""
    sent_at = time.monotonic()
    while True:
        if data := b"".join(run.events[first:]):
            first = len(run.events)
            sent_at = time.monotonic()
            yield data
        elif run.is_over:
            return
        elif keepalive_s and time.monotonic() - sent_at >= keepalive_s:
            sent_at = time.monotonic()
            yield KEEP_ALIVE
        await run.wait(first, min(_IDLE_S, keepalive_s or _IDLE_S))


async def stored_events(
    kept: KeptResponses, tenant: str, name: str, first: int, keepalive_s: float
) -> AsyncIterator[bytes]:
    """Gives the events of a response of another router, and waits for a database that is away."""

    def look(transaction: Transaction) -> tuple[ResponseRow | None, list[bytes]]:
        response = find_response(transaction, tenant, name, kept.clock())
        return response, events_from(transaction, tenant, name, first)

    sent_at = time.monotonic()
    while True:
        try:
            response, events = await kept.database.read(look)
        except StoreUnavailable:
            await asyncio.sleep(_IDLE_S)
            continue
        if events:
            first += len(events)
            sent_at = time.monotonic()
            yield b"".join(events)
        if response is None or response.is_finished:
            return
        if keepalive_s and time.monotonic() - sent_at >= keepalive_s:
            sent_at = time.monotonic()
            yield KEEP_ALIVE
        await asyncio.sleep(_LOOK_S)
