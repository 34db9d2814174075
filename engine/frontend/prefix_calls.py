"""The node server's side of cached prefixes: they move between nodes, or are forgotten.

peer ── Offer ──▶ `offer` ──▶ engine core: which blocks are cached?  ──▶ answer
engine core: who holds this prefix? ──▶ `on_asks` ──▶ `ask` a peer ──▶ `PrefixAnswer`, always
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any, TypeAlias

from engine.contracts.errors import EngineDeadError
from engine.contracts.messages import (
    OfferPrefix,
    PrefixAnswer,
    PrefixAsk,
    PrefixOffered,
    ResetPrefixCache,
    ToEngineCore,
)
from kv_transfer.metadata import KVTransferParams

logger = logging.getLogger(__name__)

PeerAnswer: TypeAlias = tuple[KVTransferParams | None, int]
"""Says what to pull, and how many blocks that is."""
Ask: TypeAlias = Callable[[PrefixAsk], Awaitable[PeerAnswer]]


class PrefixCalls:
    """Calls that are not answered yet. `send` reaches the engine core; `ask` reaches peers, where a
    node has a client for them."""

    def __init__(self, send: Callable[[ToEngineCore], None]) -> None:
        self.ask: Ask | None = None
        self._send = send
        self._ids = count(1)
        self._offers: dict[int, asyncio.Future[PrefixOffered]] = {}
        self._resets: list[asyncio.Future[bool]] = []
        """Resets that were asked for and not answered, oldest first."""
        self._asking: set[asyncio.Task[None]] = set()
        self._dead_reason = ""

    async def offer(self, names: list[bytes]) -> PrefixOffered:
        """Returns what the engine holds of these blocks now, for a peer. Raises
        `EngineDeadError`."""
        if self._dead_reason:
            raise EngineDeadError(self._dead_reason)
        call_id = next(self._ids)
        answer: asyncio.Future[PrefixOffered] = asyncio.get_running_loop().create_future()
        self._offers[call_id] = answer
        try:
            self._send(OfferPrefix(call_id, names))
            return await answer
        finally:
            del self._offers[call_id]

    async def reset(self) -> bool:
        """Forgets all cached prefixes. Returns False when running requests hold blocks. Raises
        `EngineDeadError`."""
        if self._dead_reason:
            raise EngineDeadError(self._dead_reason)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resets.append(answer)
        self._send(ResetPrefixCache())
        return await answer

    def on_reset(self, ok: bool) -> None:
        """Hears the engine core. Whoever asked may have gone."""
        answer = self._resets.pop(0)
        if not answer.done():
            answer.set_result(ok)

    def on_offered(self, answer: PrefixOffered) -> None:
        """Hears the engine core. The peer may have gone."""
        waiting = self._offers.get(answer.call_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def on_asks(self, asks: Sequence[PrefixAsk]) -> None:
        """Asks peers beside everything else."""
        for ask in asks:
            task = asyncio.create_task(self._ask(ask))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    def on_dead(self, reason: str) -> None:
        """Ends every call, and those to come, with EngineDeadError."""
        self._dead_reason = reason
        for task in self._asking:
            task.cancel()
        open_calls: list[asyncio.Future[Any]] = [*self._offers.values(), *self._resets]
        for waiting in open_calls:
            if not waiting.done():
                waiting.set_exception(EngineDeadError(reason))

    async def _ask(self, ask: PrefixAsk) -> None:
        params, num_blocks = None, 0
        try:
            if self.ask is not None:
                params, num_blocks = await self.ask(ask)
        except Exception:
            logger.exception("request %s: asking %s for a prefix", ask.request_id, ask.peer)
        self._send(PrefixAnswer(ask.request_id, params, num_blocks))
