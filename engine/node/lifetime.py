"""Brings a node that serves to its end.

serving ── asked to stop ──▶ draining ── open requests have ended, or the time is up ──▶ exit 0
   │                           │
   └─────── the engine dies ───┴──▶ final messages: open requests end with an error ──▶ exit 1

A node that shall change its role drains as one that stops; its caller sees by its `RoleSwitch`
that it goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from engine.frontend.async_llm import AsyncLLM
from engine.node.open_requests import OpenRequests
from engine.node.process import StopSignal
from engine.node.status import NodeStatus

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 2.0
"""Seconds for open requests to end with an error."""


class NodeLifetime:
    """`abort_all` ends every open request with an error. `changed` is called before anything learns
    that the node drains, or that its engine has died."""

    def __init__(
        self,
        engine: AsyncLLM,
        status: NodeStatus,
        open_requests: OpenRequests,
        abort_all: Callable[[], None],
        drain_timeout_s: float,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._status = status
        self._open = open_requests
        self._abort_all = abort_all
        self._drain_timeout_s = drain_timeout_s
        self._changed = changed

    async def run(self, stop: StopSignal) -> int:
        """Returns the exit code once the node was asked to stop, or its engine has died."""
        dead = asyncio.create_task(self._engine.wait_dead())
        stopping = asyncio.create_task(stop.wait())
        switching = asyncio.create_task(self._status.switch.requested())
        ends = {dead, stopping, switching}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not dead.done():
                limit_s = self._drain_timeout_s
                if switching.done():
                    limit_s = min(limit_s, switching.result().drain_timeout_s)
                drained = asyncio.create_task(self._drain(limit_s))
                await asyncio.wait({dead, drained}, return_when=asyncio.FIRST_COMPLETED)
                if drained.done():
                    return 0
                drained.cancel()
            report = self._engine.crash_report
            where = f"; crash report: {report}" if report else ""
            logger.error("the engine has died: %s%s", self._engine.dead_reason, where)
            self._tell()
            await self._open.wait_idle(_LAST_WORDS_S)
            return 1
        finally:
            for end in ends:
                end.cancel()

    async def _drain(self, limit_s: float) -> None:
        """Waits for open requests; those still open at the end of the time end with an error."""
        self._status.work.draining = True
        self._tell()
        logger.info("draining: %d requests are open", self._open.count)
        if not await self._open.wait_idle(limit_s):
            logger.warning("%d requests are cut off", self._open.count)
            self._abort_all()
            await self._open.wait_idle(_LAST_WORDS_S)

    def _tell(self) -> None:
        self._changed()
        self._status.notify(is_urgent=True)
