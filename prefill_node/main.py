"""Starts a prefill node from its flags."""

from __future__ import annotations

from edge.logs.setup import setup_logging
from engine.node.process import run_node
from prefill_node.config import PrefillNodeSettings
from prefill_node.server import serve


def main() -> int:
    settings = PrefillNodeSettings.from_args("tandem prefill")
    if settings.check:
        return settings.print_checked("kv_producer")
    setup_logging(settings.log_style(), "prefill")
    return run_node("prefill node", serve(settings))
