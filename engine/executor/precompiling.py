"""Starts the process that compiles an engine's kernels while weights are loaded."""

from __future__ import annotations

from edge.logs.setup import log_style
from engine.config import EngineConfig
from engine.worker.start.precompile_config import PrecompileConfig
from host.child_process import ChildProcess

_MODULE = "engine.explain.precompile"


def start_precompiling(config: EngineConfig) -> list[ChildProcess]:
    """Returns it, for the one who has to end it; nothing where there is no GPU to compile for."""
    device = config.device
    if device.device == "cpu" or not device.allows("precompile"):
        return []
    return [ChildProcess.start(_MODULE, PrecompileConfig(config, log_style()), "precompiling")]
