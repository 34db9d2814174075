"""Says what the process that compiles an engine's kernels (`engine.explain.precompile`) is given."""

from __future__ import annotations

import msgspec

from edge.logs.setup import LogStyle
from engine.config import EngineConfig


class PrecompileConfig(msgspec.Struct, frozen=True):
    """Its message on standard input."""

    engine: EngineConfig
    log: LogStyle
