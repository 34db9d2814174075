"""The node server's side of a change of roles: asks the engine core, and waits for its answer."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.contracts.errors import RoleSwitchRefused
from engine.contracts.messages import EngineReady, RoleSwitched, SwitchRole
from engine.frontend.engine_calls import EngineCalls


class RoleCalls(EngineCalls[RoleSwitched]):
    """Makes the engine one of another role, while its workers go on."""

    async def switch(self, engine: EngineConfig, empty_within_s: float) -> EngineReady:
        """Returns the engine as it is then. What it has not ended after `empty_within_s` is given
        up. Raises `RoleSwitchRefused`, and nothing has changed; `EngineDeadError`."""
        call = SwitchRole(call_id=next(self._ids), engine=engine, empty_within_s=empty_within_s)
        answer = await self._ask(call)
        if answer.ready is None:
            raise RoleSwitchRefused(answer.refusal)
        return answer.ready
