"""Says which release of tandem runs here."""

from __future__ import annotations

import importlib.metadata

UNKNOWN_VERSION = "0+unknown"
"""The version of sources that are found by a path alone. Two such trees need not be equal."""


def installed_version() -> str:
    """Returns the version that is installed, or `UNKNOWN_VERSION` where none is."""
    try:
        return importlib.metadata.version("tandem")
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN_VERSION
