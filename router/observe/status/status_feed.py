"""Gives viewers of the status page what changes, each second, as server-sent events.

    sources ── snapshot, once a tick for all ──▶ full    to a viewer that is new, or missed one
                                            └──▶ update  only what is not as it was

1. nothing looks     nothing is made
2. a viewer comes   ticks begin; it gets a full snapshot
3. each tick        an update for all, even if nothing changed: a page that receives none is stale
4. a viewer reads   slowly: it skips ticks, and goes on with a full snapshot. It takes nothing for
                    `_SEND_TIMEOUT_S`: it is disconnected
5. closed           the router ends: so do the streams
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping

from starlette.types import Receive, Scope, Send

from edge.http.connection.client_connection import ClientDisconnected, ClientGuard
from edge.http.errors import send_error
from edge.http.event_loop.shared_work import SharedWork
from router.errors import Overloaded
from router.observe.status.snapshot import Snapshot

logger = logging.getLogger(__name__)

MAX_VIEWERS = 64
_TICK_S = 1.0
_NODES_PER_TICK_S = 64
"""Ticks are further apart with more nodes: a page of them all is not read in a second."""
_SEND_TIMEOUT_S = 5.0
_ENDED_PER_TICK = 25
"""Requests that ended since the tick before; of more, the last. Nothing reads faster."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]


class StatusFeed:
    """Serves the stream of events (ASGI). `take` makes a snapshot."""

    def __init__(self, take: Callable[[], Awaitable[Snapshot]], tick_s: float = _TICK_S) -> None:
        self._take = take
        self._tick_s = tick_s
        self._tick = 0
        self._snapshot: Snapshot | None = None
        self._update = b""
        self._full = b""
        self._full_tick = -1
        self._next: asyncio.Future[None] | None = None
        self._ticking: asyncio.Task[None] | None = None
        self.num_viewers = 0
        self._is_closed = False
        self._whole = SharedWork(self._make_document)
        self._newest = SharedWork(self._advance)
        """Viewers that come and go cost no snapshot each, and no two are made at a time."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send(_body(b"", more=False))
            return
        if self._is_closed or self.num_viewers >= MAX_VIEWERS:
            busy = Overloaded("Too many look at the status page. Try again later.", retry_after_s=5)
            await send_error(send, busy)
            return
        with contextlib.suppress(ClientDisconnected, TimeoutError):
            async with ClientGuard(receive):
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                async with contextlib.aclosing(self.events()) as events:
                    async for event in events:
                        async with asyncio.timeout(_SEND_TIMEOUT_S):
                            await send(_body(event, more=True))
                await send(_body(b"", more=False))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields events for one viewer until the feed is closed."""
        self.num_viewers += 1
        try:
            seen = -1
            while not self._is_closed:
                if self._ticking is None:
                    await self._newest.get()
                if self._ticking is None:
                    self._ticking = asyncio.create_task(self._run(), name="router status feed")
                if seen != self._tick:
                    is_next = seen == self._tick - 1
                    seen = self._tick
                    yield self._update if is_next else self._full_event()
                else:
                    await self._wait()
        finally:
            self.num_viewers -= 1
            if not self.num_viewers and self._ticking is not None:
                self._ticking.cancel()
                self._ticking = self._snapshot = None

    def close(self) -> None:
        """Ends all streams."""
        self._is_closed = True
        self._wake()

    async def document(self) -> bytes:
        """Returns a whole snapshot as JSON, for programs."""
        return await self._whole.get()

    async def _make_document(self) -> bytes:
        snapshot = await self._take()
        return _document(0, snapshot, self._interval_s(snapshot))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s(self._snapshot))
            try:
                await self._newest.get()
            except Exception:
                logger.exception("no snapshot for the status page")

    def _interval_s(self, snapshot: Snapshot | None) -> float:
        num_nodes = len(snapshot.nodes) if snapshot else 0
        return self._tick_s * (1 + num_nodes // _NODES_PER_TICK_S)

    async def _advance(self) -> None:
        taken = await self._take()
        before, self._snapshot = self._snapshot, taken
        self._tick += 1
        if before is not None:
            self._update = _event(_changes(self._tick, before, taken))
        self._wake()

    def _wake(self) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
        self._next = None

    async def _wait(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next)

    def _full_event(self) -> bytes:
        assert self._snapshot is not None
        if self._full_tick != self._tick:
            interval_s = self._interval_s(self._snapshot)
            self._full = _event(_document(self._tick, self._snapshot, interval_s))
            self._full_tick = self._tick
        return self._full


def _document(tick: int, snapshot: Snapshot, tick_s: float) -> bytes:
    return _object(
        [
            *_head(tick),
            (b"full", b"true"),
            (b"tick_s", b"%.1f" % tick_s),
            *_named(snapshot.sections),
            (b"nodes", _list(snapshot.nodes.values())),
            (b"open", snapshot.open),
            (b"ended", _list(snapshot.ended.values())),
        ]
    )


def _changes(tick: int, old: Snapshot, new: Snapshot) -> bytes:
    """Returns what is not in `old`."""
    known = max(old.ended, default=0)
    ended = [number for number in new.ended if number > known][-_ENDED_PER_TICK:]
    nodes = [shown for name, shown in new.nodes.items() if old.nodes.get(name) != shown]
    parts = [
        *_head(tick),
        *_named({k: v for k, v in new.sections.items() if old.sections[k] != v}),
    ]
    if nodes:
        parts.append((b"nodes", _list(nodes)))
    if new.open != old.open:
        parts.append((b"open", new.open))
    if ended:
        parts.append((b"ended", _list(new.ended[number] for number in ended)))
    return _object(parts)


def _head(tick: int) -> list[tuple[bytes, bytes]]:
    return [(b"tick", b"%d" % tick), (b"now", b"%.1f" % time.time())]


def _named(sections: Mapping[str, bytes]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), facts) for name, facts in sections.items()]


def _object(parts: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"{%b}" % b",".join(b'"%b":%b' % part for part in parts)


def _list(items: Iterable[bytes]) -> bytes:
    return b"[%b]" % b",".join(items)


def _event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def _body(data: bytes, *, more: bool) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": more}
