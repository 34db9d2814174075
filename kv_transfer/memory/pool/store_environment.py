"""Sets what Mooncake's logging reads from the environment when it is loaded, unless it is set."""

from __future__ import annotations

import os


def set_defaults() -> None:
    """Has it log errors alone: it says much about each connection. Its own variable overrides that
    of the logging library that it has (0.3.13)."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
