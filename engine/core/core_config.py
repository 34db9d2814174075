"""Settings that the engine core process is given at its start."""

from __future__ import annotations

import msgspec

from edge.logs.setup import LogStyle
from engine.config import EngineConfig
from engine.contracts.steps.step_log import StepLogHandle
from host.life_signs import LifeSignHandle
from host.pause_log import PauseLogHandle

CORE_MODULE = "engine.core.core_proc"
"""Run as `python -m`."""


class CoreProcConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the engine core. `client_address` is where the node server listens for us;
    `life_signs` is our place, before those of the workers and transfer processes, or None when
    nothing watches. `step_log`, `pauses`: where the last steps are noted, and what holds the core
    up; None: nothing reads it."""

    engine: EngineConfig
    client_address: str
    log: LogStyle
    life_signs: LifeSignHandle | None = None
    step_log: StepLogHandle | None = None
    pauses: PauseLogHandle | None = None
