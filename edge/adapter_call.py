"""Says what a call did to an adapter, and which of two calls is the newer one.

Nodes and routers must agree on that, or they would undo each other's calls.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

LOAD_LIMIT_S = 120.0
"""Seconds within which a node says what became of an adapter that it was to load."""
UNLOAD_LIMIT_S = 600.0
"""The same of one that it was to unload: its requests end first."""
MAX_VERSION = (1 << 63) - 1
"""Versions are milliseconds since 1970: one above was never made by a clock, and none could follow
it."""


@dataclass(frozen=True, slots=True)
class AdapterCall:
    """The newest call about a name. `digest` is empty where it was unloaded, `model` where nothing
    said whose adapter it is: then it is the node's that tells of it."""

    name: str
    digest: str
    path: str
    version: int
    model: str = ""

    @property
    def order(self) -> tuple[int, str]:
        """Returns what is larger for the newer of two calls. Two routers may make the same version
        at once: then all nodes choose the same one."""
        return self.version, self.digest


def version_after(known: AdapterCall | None) -> int:
    """Returns a version that is newer than `known`: milliseconds since 1970, or more."""
    return max(time.time_ns() // 1_000_000, known.version + 1 if known else 1)
