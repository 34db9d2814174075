"""The node server's side of cached prefixes: they move between nodes, or are forgotten.

peer ── Offer ──▶ `offer` ──▶ engine core: which blocks are cached?  ──▶ answer
engine core: who holds this prefix? ──▶ `on_asks` ──▶ `ask` a peer ──▶ `PrefixAnswer`, always
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from edge.grpc_answers import SHORT_CALL_S
from engine.contracts.messages import (
    OfferPrefix,
    PrefixAnswer,
    PrefixAsk,
    PrefixCacheReset,
    PrefixOffered,
    ResetPrefixCache,
)
from engine.contracts.prefix_holder import HashChains
from engine.frontend.calls.engine_calls import EngineCalls
from kv_transfer.metadata import KVTransferParams

logger = logging.getLogger(__name__)

PeerAnswer: TypeAlias = tuple[KVTransferParams | None, int]
"""Says what to pull, and how many tokens that is."""
_TIMEOUT_S = 0.8 * SHORT_CALL_S
"""The node's answer says that its engine gave none, before its caller gives it up."""
Ask: TypeAlias = Callable[[PrefixAsk], Awaitable[PeerAnswer]]


class PrefixCalls:
    """Calls about prefixes. `ask` reaches peers, where a node has a client for them."""

    def __init__(self, calls: EngineCalls) -> None:
        self.ask: Ask | None = None
        self._calls = calls
        self._asking: set[asyncio.Task[None]] = set()

    async def offer(self, chains: HashChains) -> PrefixOffered:
        """Returns what the engine holds of this prompt now, for a peer. Raises
        `EngineCallTimeout`, `EngineDeadError`."""
        call = OfferPrefix(self._calls.next_id(), chains)
        return await self._calls.ask(call, PrefixOffered, _TIMEOUT_S)

    async def reset(self) -> bool:
        """Forgets all cached prefixes. Returns False when running requests hold blocks. Raises
        `EngineCallTimeout`, `EngineDeadError`."""
        call = ResetPrefixCache(self._calls.next_id())
        return (await self._calls.ask(call, PrefixCacheReset, _TIMEOUT_S)).ok

    def on_asks(self, asks: Sequence[PrefixAsk]) -> None:
        """Asks peers beside everything else."""
        for ask in asks:
            task = asyncio.create_task(self._ask(ask))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    def close(self) -> None:
        """Stops asking peers: the engine is dead."""
        for task in self._asking:
            task.cancel()

    async def _ask(self, ask: PrefixAsk) -> None:
        params, num_tokens = None, 0
        try:
            if self.ask is not None:
                params, num_tokens = await self.ask(ask)
        except Exception:
            logger.exception("request %s: asking %s for a prefix", ask.request_id, ask.peer)
        self._calls.send(PrefixAnswer(ask.request_id, ask.number, params, num_tokens))
