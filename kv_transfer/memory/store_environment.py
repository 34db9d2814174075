"""Sets what Mooncake's logging reads from the environment when it is loaded, unless it is set."""

from __future__ import annotations

import os


def set_defaults() -> None:
    """Has it log errors alone: it says much about each connection."""
    os.environ.setdefault("GLOG_minloglevel", "2")
