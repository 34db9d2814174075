"""Starts a prefill node from its flags, and says why one cannot start."""

from __future__ import annotations

import uvloop

from edge.logs.setup import setup_logging, tell_failure
from edge.security.config import SecurityError
from edge.tracing.errors import TracingError
from engine.errors import EngineDeadError
from engine.frontend.tokenizer import TokenizerError
from engine.models.checkpoint import CheckpointError
from engine.node.grpc_server import PortInUse
from engine.node.settings import SettingsError
from prefill_node.config import PrefillNodeSettings
from prefill_node.server import serve


def main() -> int:
    settings = PrefillNodeSettings.from_args("python -m prefill_node")
    if settings.check:
        return settings.print_checked("kv_producer")
    setup_logging(settings.log_style(), "prefill")
    try:
        return uvloop.run(serve(settings))
    except (
        CheckpointError,
        EngineDeadError,
        PortInUse,
        SettingsError,
        SecurityError,
        TokenizerError,
        TracingError,
    ) as error:
        tell_failure("prefill node", error)
        return 1
