"""Calls that the engine core answers one by one, in its time: profiles, adapters, roles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeAlias, TypeVar

from engine.contracts.errors import EngineDeadError
from engine.contracts.messages import (
    AdapterAnswer,
    AddAdapter,
    ProfileAnswer,
    RemoveAdapter,
    RoleSwitched,
    StartProfile,
    StopProfile,
    SwitchRole,
    ToEngineCore,
)

AnswerT = TypeVar("AnswerT", ProfileAnswer, AdapterAnswer, RoleSwitched)
Call: TypeAlias = StartProfile | StopProfile | AddAdapter | RemoveAdapter | SwitchRole


class EngineCalls(Generic[AnswerT]):
    """Calls that are not answered yet, by their ids. `send` reaches the engine core."""

    def __init__(self, send: Callable[[ToEngineCore], None]) -> None:
        self._send = send
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[AnswerT]] = {}
        self._dead_reason = ""

    async def _ask(self, call: Call) -> AnswerT:
        """Returns the answer. Raises `EngineDeadError`."""
        if self._dead_reason:
            raise EngineDeadError(self._dead_reason)
        waiting: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self._waiting[call.call_id] = waiting
        try:
            self._send(call)
            return await waiting
        finally:
            del self._waiting[call.call_id]

    def on_answer(self, answer: AnswerT) -> None:
        """Hears the engine core. The caller may have gone."""
        waiting = self._waiting.get(answer.call_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def on_dead(self, reason: str) -> None:
        """Ends every call, and those to come, with EngineDeadError."""
        self._dead_reason = reason
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EngineDeadError(reason))
