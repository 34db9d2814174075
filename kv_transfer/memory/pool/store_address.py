"""Reads where a KV store beyond the host is: `mooncake://HOST:PORT?protocol=rdma`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import parse_qsl, urlsplit

_PROTOCOLS = ("tcp", "rdma")
_CONNECTIONS = 2
_MOST = 8
_FIELDS = ("protocol", "devices", "metadata", "replicas", "connections")


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Leads to a master of Mooncake Store.

    Attributes:
        master: `HOST:PORT`.
        protocol: How blocks move between this node and the store's memory: tcp or rdma.
        devices: Of rdma, comma separated; empty: all.
        metadata: The metadata server of the store's engines; `P2PHANDSHAKE`: they need none.
        replicas: Copies of each block.
        connections: Of each transfer process: as many threads receive.
    """

    master: str
    protocol: str = "tcp"
    devices: str = ""
    metadata: str = "P2PHANDSHAKE"
    replicas: int = 1
    connections: int = _CONNECTIONS

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises ValueError, which says what is wrong."""
        parts = urlsplit(url)
        if parts.scheme != "mooncake" or not parts.hostname or parts.port is None:
            raise ValueError("it is mooncake://HOST:PORT of the master")
        if parts.path not in ("", "/"):
            raise ValueError(f"it has a path, {parts.path}")
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := given.keys() - set(_FIELDS):
            raise ValueError(f"{sorted(unknown)[0]} is none of {', '.join(_FIELDS)}")
        if given.get("protocol", "tcp") not in _PROTOCOLS:
            raise ValueError(f"protocol is one of {', '.join(_PROTOCOLS)}")
        return cls(
            parts.netloc,
            given.get("protocol", "tcp"),
            given.get("devices", ""),
            given.get("metadata", "P2PHANDSHAKE"),
            _count(given, "replicas", 1),
            _count(given, "connections", _CONNECTIONS),
        )


def _count(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name, str(default))
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise ValueError(f"{name} is a number, 1 to {_MOST}")
    return int(text)
