"""Starts a decode node from its flags."""

from __future__ import annotations

import sys

from decode_node.config import DecodeNodeSettings
from decode_node.served_text import ServedText, create_parsers
from decode_node.server import check_files, serve
from edge.http.event_loop.large_blocks import return_large_blocks
from edge.logs.setup import setup_logging
from engine.frontend.tokenizer import Tokenizer
from engine.node.process import run_node
from engine.node.settings.engine_settings import SettingsError


def main() -> int:
    settings = DecodeNodeSettings.from_args("tandem decode")
    if settings.check:
        return _check(settings)
    setup_logging(settings.log_style(), "decode")
    return_large_blocks()
    return run_node("decode node", serve(settings))


def _check(settings: DecodeNodeSettings) -> int:
    """Does what `--check` asks and returns the exit code. Where no model is here, of parsers only
    the names can be wrong."""
    try:
        create_parsers(settings, Tokenizer.stand_in(1))
        check_files(settings)
    except SettingsError as error:
        print(f"wrong settings: {error}", file=sys.stderr)
        return 2
    return settings.print_checked(
        "kv_consumer", lambda config: ServedText.read(settings, config.model)
    )
