"""Looks what there is for NIXL on this host, and sets what UCX and NIXL read from the environment
when they are loaded, unless it is set."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from host.network import SYS, interfaces_by_address, numeric, rdma_ports
from kv_transfer.config import FASTEST, KVTransferConfig

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")


def is_tried(config: KVTransferConfig) -> bool:
    """Returns whether NIXL is compared with the stream: the fastest is asked for, there is RDMA,
    NIXL is installed, and KV may move in the clear."""
    return (
        config.transports == FASTEST
        and not config.security.has_tls
        and bool(rdma_ports())
        and any(importlib.util.find_spec(package) for package in PACKAGES)
    )


def has_window(config: KVTransferConfig) -> bool:
    """Returns whether transfer processes take memory of their device for NIXL."""
    return config.names_nixl or is_tried(config)


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
    return sorted(found) + rdma_ports(sys)
