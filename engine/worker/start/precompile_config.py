"""Says what the process is given that compiles kernels (`engine.explain.precompile`)."""

from __future__ import annotations

import msgspec

from edge.logs.setup import LogStyle
from engine.config import EngineConfig


class PrecompileConfig(msgspec.Struct, frozen=True):
    """Its message on standard input."""

    engine: EngineConfig
    log: LogStyle
