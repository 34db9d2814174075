"""Reads the variables that are not ours: OpenTelemetry's own, which every exporter honours, and
those by which a pod knows its place. They are no second definition of a setting."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

_PREFIXES = "OTEL_", "K8S_"


def tracing_environment() -> Mapping[str, str]:
    """Returns them, as they are now."""
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}


def host_name() -> str:
    """Returns where this process runs, for people: its pod's name where the chart says it, which on
    the network of a host is not that of the host; else the host's."""
    return os.environ.get("K8S_POD_NAME") or socket.gethostname()
