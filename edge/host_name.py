"""Names where this process runs, for people: its pod, or its host."""

from __future__ import annotations

import socket

from edge.tracing.environment import tracing_environment


def host_name() -> str:
    """Returns the pod's name where the chart says it, which on the network of a host is not the
    name of the host."""
    return tracing_environment().get("K8S_POD_NAME") or socket.gethostname()
