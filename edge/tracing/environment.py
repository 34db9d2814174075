"""Reads the variables that are not ours: OpenTelemetry's own, which every exporter honours, and
those by which a pod knows its place. They are no second definition of a setting."""

from __future__ import annotations

import os
from collections.abc import Mapping

_PREFIXES = "OTEL_", "K8S_"


def tracing_environment() -> Mapping[str, str]:
    """Returns them, as they are now."""
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
