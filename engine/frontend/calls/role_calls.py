"""The node server's side of a change of roles: asks the engine core, and waits for its answer."""

from __future__ import annotations

from collections.abc import Callable

from engine.config import EngineConfig
from engine.contracts.errors import EngineCallTimeout, EngineDeadError, RoleSwitchRefused
from engine.contracts.messages import EngineReady, RoleSwitched, SwitchRole
from engine.frontend.calls.engine_calls import EngineCalls

_SWITCH_TIMEOUT_S = 120.0
"""Beside the time for what is open: the steps in flight end, and transfer processes start."""


class RoleCalls:
    """Makes the engine one of another role, while its workers go on. `give_up` declares it dead."""

    def __init__(self, calls: EngineCalls, give_up: Callable[[str], None]) -> None:
        self._calls = calls
        self._give_up = give_up

    async def switch(self, engine: EngineConfig, empty_within_s: float) -> EngineReady:
        """Returns the engine as it is then. What it has not ended after `empty_within_s` is given
        up. Raises `RoleSwitchRefused`, and nothing has changed; `EngineDeadError`, also for an
        engine that does not answer: its role is unknown then."""
        call = SwitchRole(
            call_id=self._calls.next_id(), engine=engine, empty_within_s=empty_within_s
        )
        try:
            answer = await self._calls.ask(call, RoleSwitched, empty_within_s + _SWITCH_TIMEOUT_S)
        except EngineCallTimeout as error:
            self._give_up(str(error))
            raise EngineDeadError(str(error)) from None
        if answer.ready is None:
            raise RoleSwitchRefused(answer.refusal)
        return answer.ready
