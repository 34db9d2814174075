"""Starts a decode node from its flags, and says why one cannot start."""

from __future__ import annotations

import sys

import uvloop

from decode_node.config import DecodeNodeSettings
from decode_node.served_text import create_parsers
from decode_node.server import serve
from edge.logs.setup import setup_logging, tell_failure
from edge.security.config import SecurityError
from edge.tracing.errors import TracingError
from engine.errors import CannotStartError, EngineDeadError
from engine.frontend.tokenizer import Tokenizer, TokenizerError
from engine.node.grpc_server import PortInUse
from engine.node.settings import SettingsError


def main() -> int:
    settings = DecodeNodeSettings.from_args("python -m decode_node")
    if settings.check:
        return _check(settings)
    setup_logging(settings.log_style(), "decode")
    try:
        return uvloop.run(serve(settings))
    except (
        CannotStartError,
        EngineDeadError,
        PortInUse,
        SecurityError,
        SettingsError,
        TokenizerError,
        TracingError,
        OSError,
    ) as error:
        tell_failure("decode node", error)
        return 1


def _check(settings: DecodeNodeSettings) -> int:
    """Does what `--check` asks and returns the exit code. No model is read, so that of parsers only
    the names can be wrong."""
    try:
        create_parsers(settings, Tokenizer.stand_in(1))
    except SettingsError as error:
        print(f"wrong settings: {error}", file=sys.stderr)
        return 2
    return settings.print_checked("kv_consumer")
