"""Sets what UCX and NIXL read from the environment when they are loaded, unless it is set."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from host.network import SYS, interfaces_by_address, numeric


def set_defaults(hosts: Sequence[str]) -> None:
    """Keeps UCX to the interfaces of `hosts`, addresses of this host, and both libraries quiet."""
    os.environ.setdefault("UCX_NET_DEVICES", ",".join(network_devices(hosts)))
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")


def network_devices(hosts: Sequence[str], sys: Path = SYS) -> list[str]:
    """Returns devices as UCX names them, all RDMA devices among them. Left to itself, UCX would
    listen on all interfaces."""
    interfaces = interfaces_by_address()
    found = {interfaces[numeric(host)] for host in hosts if numeric(host) in interfaces}
    ports = sys.glob("class/infiniband/*/ports/*")
    return sorted(found) + sorted(f"{port.parent.parent.name}:{port.name}" for port in ports)
