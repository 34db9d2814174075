"""A running engine changes its role: workers stay, what decides begins anew.

    asked ──▶ emptying ──── nothing is left ─────────────────────────┐
                 │                                                   ▼
                 └─ the time is up ──▶ holding: no step starts ──▶ switched, answered
                                       until the last has ended

While it is emptying the engine goes on as ever: the node server gives it no new requests by then.
What is left after its time is given up: requests that nothing asked to end, KV that a peer does not
fetch. Whatever fails while it switches ends the engine.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Protocol

from engine.config import EngineConfig
from engine.contracts.messages import RoleSwitched, SwitchRole

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.02


class SwitchedCore(Protocol):
    """The part of `EngineCore` that is needed here."""

    def in_the_way(self) -> list[str]: ...
    def hold_steps(self) -> bool: ...
    def switch_role(self, config: EngineConfig) -> None: ...


class RoleSession:
    """Answers calls of the node server, one at a time. Nothing here waits but `switch`."""

    def __init__(self, core: SwitchedCore, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._clock = clock
        self._call: SwitchRole | None = None
        self._give_up_at = math.inf

    @property
    def deadline(self) -> float:
        """Returns the CLOCK_MONOTONIC seconds at which `is_due` wants to be asked again."""
        return math.inf if self._call is None else self._clock() + _LOOK_INTERVAL_S

    def ask(self, call: SwitchRole) -> RoleSwitched | None:
        """Begins. Returns a refusal while another switch is under way."""
        if self._call is not None:
            return RoleSwitched(call.call_id, refusal="the engine changes its role already")
        self._call = call
        self._give_up_at = self._clock() + call.empty_within_s
        return None

    def is_due(self) -> bool:
        """Returns whether to `switch` now."""
        if self._call is None:
            return False
        left = self._core.in_the_way()
        if not left:
            return True
        if self._clock() < self._give_up_at or not self._core.hold_steps():
            return False
        logger.warning("the role changes although something is left: %s", ", ".join(left))
        return True

    def switch(self) -> int:
        """Switches, and returns the id of the call to answer. Raises `EngineDeadError`,
        `KVTransferError`: the engine cannot go on."""
        assert self._call is not None
        call, self._call = self._call, None
        self._core.switch_role(call.engine)
        return call.call_id
