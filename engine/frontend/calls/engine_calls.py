"""The ledger of calls that the engine core answers one by one, in its time: profiles, adapters,
roles, cached prefixes.

    asked ──┬─ answered
            ├─ the engine dies            EngineDeadError, as for every later call
            ├─ its deadline passes        EngineCallTimeout; a late answer is dropped
            └─ its caller has gone        nothing: a late answer is dropped
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import TypeAlias, TypeVar

from engine.contracts.errors import EngineCallTimeout, EngineDeadError
from engine.contracts.messages import (
    AddAdapter,
    EngineAnswer,
    OfferPrefix,
    RemoveAdapter,
    ResetPrefixCache,
    StartProfile,
    StopProfile,
    SwitchRole,
    ToEngineCore,
)

AnswerT = TypeVar("AnswerT", bound=EngineAnswer)
Call: TypeAlias = (
    OfferPrefix
    | ResetPrefixCache
    | StartProfile
    | StopProfile
    | AddAdapter
    | RemoveAdapter
    | SwitchRole
)


class EngineCalls:
    """All calls of one engine that have no answer yet, by their ids. `send` reaches the engine
    core."""

    def __init__(self, send: Callable[[ToEngineCore], None]) -> None:
        self.send = send
        self._ids = count(1)
        self._open: dict[int, tuple[Call, asyncio.Future[EngineAnswer]]] = {}
        self._dead_reason = ""

    def next_id(self) -> int:
        """Returns an id for a call."""
        return next(self._ids)

    async def ask(self, call: Call, answer_type: type[AnswerT], timeout_s: float) -> AnswerT:
        """Returns the answer. An answer that has arrived counts, also after a standstill of this
        process that was longer than `timeout_s`.

        Raises:
            EngineCallTimeout: There was none for `timeout_s`. The engine may still do what it was
                asked to do.
            EngineDeadError: The engine is dead.
        """
        if self._dead_reason:
            raise EngineDeadError(self._dead_reason)
        waiting: asyncio.Future[EngineAnswer] = asyncio.get_running_loop().create_future()
        self._open[call.call_id] = call, waiting
        try:
            self.send(call)
            await asyncio.wait((waiting,), timeout=timeout_s)
        finally:
            del self._open[call.call_id]
        if not waiting.done():
            raise EngineCallTimeout(type(call).__name__, timeout_s)
        answer = waiting.result()
        assert isinstance(answer, answer_type)
        return answer

    def on_answer(self, answer: EngineAnswer) -> None:
        """Takes an answer of the engine core. Its caller may have gone."""
        _, waiting = self._open.get(answer.call_id, (None, None))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def on_dead(self, reason: str) -> None:
        """Ends every call, and those to come, with EngineDeadError."""
        self._dead_reason = reason
        for _, waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(EngineDeadError(reason))

    def leftovers(self) -> list[str]:
        """Names the calls that have no answer yet."""
        return [type(call).__name__ for call, _ in self._open.values()]
