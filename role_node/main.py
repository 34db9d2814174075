"""Starts a node that changes its role, from its flags."""

from __future__ import annotations

import sys

from decode_node.served_text import create_parsers
from decode_node.server import check_files
from edge.logs.setup import setup_logging
from engine.frontend.tokenizer import Tokenizer
from engine.node.process import run_node
from engine.node.settings.engine_settings import SettingsError
from role_node.config import RoleNodeSettings
from role_node.server import read_model, serve


def main() -> int:
    settings = RoleNodeSettings.from_args("tandem node")
    if settings.check:
        return _check(settings)
    setup_logging(settings.log_style(), "node")
    return run_node("node", serve(settings))


def _check(settings: RoleNodeSettings) -> int:
    """Does what `--check` asks, for both roles, and returns the exit code."""
    try:
        create_parsers(settings, Tokenizer.stand_in(1))
        check_files(settings)
        settings.check_roles()
    except SettingsError as error:
        print(f"wrong settings: {error}", file=sys.stderr)
        return 2
    return settings.print_checked("kv_producer", lambda config: read_model(settings, is_check=True))
