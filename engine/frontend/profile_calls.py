"""The node server's side of profiles: asks the engine core, and waits for its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from engine.errors import EngineDeadError
from engine.messages import ProfileAnswer, StartProfile, StopProfile, ToEngineCore
from engine.profiles import Profile, ProfileOptions, ProfileRefused


class ProfileCalls:
    """Calls that are not answered yet. `send` reaches the engine core."""

    def __init__(self, send: Callable[[ToEngineCore], None]) -> None:
        self._send = send
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[ProfileAnswer]] = {}
        self._dead_reason = ""

    async def start(self, options: ProfileOptions) -> Profile:
        """Returns the profile once it runs on every rank. Raises `ProfileRefused`,
        `EngineDeadError`."""
        return await self._ask(StartProfile(next(self._ids), options))

    async def stop(self) -> Profile:
        """Returns the last profile once all its files are written. Raises like `start`."""
        return await self._ask(StopProfile(next(self._ids)))

    async def _ask(self, call: StartProfile | StopProfile) -> Profile:
        if self._dead_reason:
            raise EngineDeadError(self._dead_reason)
        waiting: asyncio.Future[ProfileAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[call.call_id] = waiting
        try:
            self._send(call)
            answer = await waiting
        finally:
            del self._waiting[call.call_id]
        if answer.profile is None:
            raise ProfileRefused(answer.refusal, answer.code)
        return answer.profile

    def on_answer(self, answer: ProfileAnswer) -> None:
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
