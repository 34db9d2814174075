"""Admits requests of batches while nodes have capacity that nothing else uses.

1. asked      a batch wants to send a request to a model, one at a time
2. admitted   in turn, when nodes have room by their reports (`candidates/spare_nodes.py`)
3. released   its answer is kept

Nodes are looked at all the time, so that their use is known when the first request comes. Where
none has room for a minute, the log says so once, until one has.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from router.placement.candidates.spare_nodes import SpareNodes

_LOOK_S = 0.1
_PAUSE_S = 0.02
_LONG_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    num_tokens: int
    may_go: asyncio.Future[None]


@dataclass(slots=True)
class IdleRoom:
    """Counts at most `max_concurrent` requests at once."""

    spare: SpareNodes
    max_concurrent: int
    running: Counter[str] = field(default_factory=Counter)
    _free: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Tokens and requests that may still begin before the next look."""
    _lines: defaultdict[str, deque[_Waiting]] = field(default_factory=lambda: defaultdict(deque))
    _stands_since: dict[str, float] = field(default_factory=dict)
    """When a model's requests began to wait while none of them runs; infinity: the log says so."""

    @property
    def num_running(self) -> int:
        return self.running.total()

    async def enter(self, model: str, num_tokens: int) -> None:
        """Waits until a prompt of this many tokens may go; then it counts until `leave`."""
        waiting = _Waiting(num_tokens, asyncio.get_running_loop().create_future())
        line = self._lines[model]
        line.append(waiting)
        self._admit(model)
        try:
            await waiting.may_go
        except asyncio.CancelledError:
            if waiting in line:
                line.remove(waiting)
            else:
                self.leave(model)
            raise

    def leave(self, model: str) -> None:
        self.running[model] -= 1
        if not self.running[model]:
            del self.running[model]

    async def run(self) -> None:
        """Admits requests, until cancelled."""
        while True:
            self.spare.look()
            self._free.clear()
            for model in [model for model, line in self._lines.items() if line]:
                self._admit(model)
            self._note_standstill()
            await asyncio.sleep(_PAUSE_S if any(self._lines.values()) else _LOOK_S)

    def _note_standstill(self) -> None:
        now = time.monotonic()
        for model, line in self._lines.items():
            if not line or self.running[model]:
                self._stands_since.pop(model, None)
            elif now - self._stands_since.setdefault(model, now) > _LONG_S:
                self._stands_since[model] = math.inf
                logger.warning(
                    "batches for %s wait: for %d s no node was free of other work for %g s; decode "
                    "nodes with --itl-objective-ms run them beside it (docs/batches.md)",
                    model, _LONG_S, self.spare.window_s,
                )  # fmt: skip

    def _admit(self, model: str) -> None:
        """Admits those that wait, as far as there was room at the last look."""
        line = self._lines[model]
        if model not in self._free:
            self._free[model] = self.spare.free_tokens(model), self.spare.num_rooms(model)
        tokens, rooms = self._free[model]
        while line and tokens > 0 and rooms > 0 and self.num_running < self.max_concurrent:
            waiting = line.popleft()
            self.running[model] += 1
            waiting.may_go.set_result(None)
            tokens -= waiting.num_tokens
            rooms -= 1
        self._free[model] = tokens, rooms


@dataclass(slots=True)
class IdlePlace:
    """Is the place of one request in the room, which it may leave for a while."""

    room: IdleRoom
    model: str
    num_tokens: int
    _is_in: bool = False

    async def enter(self) -> None:
        await self.room.enter(self.model, self.num_tokens)
        self._is_in = True

    def leave(self) -> None:
        """Leaves, if it is in."""
        if self._is_in:
            self._is_in = False
            self.room.leave(self.model)
