"""`python -m decode_node`: see `--help`."""

from __future__ import annotations

import sys

import uvloop

from decode_node.config import DecodeNodeSettings
from decode_node.server import serve
from engine.errors import EngineDeadError
from engine.frontend.node_grpc import PortInUse
from engine.frontend.node_process import setup_logging
from engine.frontend.settings import SettingsError
from engine.frontend.tokenizer import TokenizerError
from engine.models.checkpoint import CheckpointError
from tandem_wire.security_config import SecurityError


def main() -> int:
    settings = DecodeNodeSettings.from_args("python -m decode_node")
    if settings.check:
        return settings.print_checked("kv_consumer")
    setup_logging(settings.log_level)
    try:
        return uvloop.run(serve(settings))
    except (
        CheckpointError,
        EngineDeadError,
        PortInUse,
        SecurityError,
        SettingsError,
        TokenizerError,
        OSError,
    ) as error:
        print(f"decode node: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
