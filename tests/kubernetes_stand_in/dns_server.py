"""Cluster DNS: names of Services, answered from what the store says at that moment.

A Service with an address resolves to it; a headless one to its ready endpoints; anything else does
not exist. Only A records, over UDP.

C libraries ask port 53 of the server in /etc/resolv.conf and no other, so this needs the right to
listen there, and pods need a resolv.conf of their own (`container_process`): root, mostly.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
import subprocess
import sys
from functools import cache
from typing import cast

from tests.kubernetes_stand_in.object_store import ObjectStore

DOMAIN = "cluster.local"
_A, _IN = 1, 1
_NO_SUCH_NAME = 3


@cache
def may_serve() -> bool:
    """Returns whether this machine lets us listen on port 53 and give pods a mount
    namespace each.
    """
    with socket.socket(type=socket.SOCK_DGRAM) as attempt:
        try:
            attempt.bind(("127.64.0.253", 53))
        except PermissionError:
            return False
        except OSError:  # another test run is trying the same
            pass
    unshare = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x20000) != 0)"
    return subprocess.run([sys.executable, "-S", "-c", unshare], check=False).returncode == 0


def resolv_conf(server: str, namespace: str) -> str:
    search = f"{namespace}.svc.{DOMAIN} svc.{DOMAIN} {DOMAIN}"
    return f"nameserver {server}\nsearch {search}\noptions ndots:5 timeout:2 attempts:2\n"


class DnsServer(asyncio.DatagramProtocol):
    """`start` → `close`. Does nothing where it may not."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._transport: asyncio.DatagramTransport | None = None

    async def start(self) -> None:
        if not may_serve():
            return
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: self, local_addr=(self._store.network.dns, 53))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self._transport is not None
        self._transport.sendto(self._answer(data), addr)

    def resolve(self, name: str) -> list[str] | None:
        """Addresses; None: there is no such name."""
        service_name, _, rest = name.rstrip(".").partition(".")
        namespace, _, suffix = rest.partition(".")
        if suffix != f"svc.{DOMAIN}":
            return None
        service = self._store.find("Service", namespace, service_name)
        if service is None:
            return None
        address = service["spec"].get("clusterIP", "None")
        return [address] if address != "None" else self._ready(namespace, service_name)

    def _ready(self, namespace: str, service: str) -> list[str]:
        return [
            endpoint["addresses"][0]
            for slice_ in self._store.list_kind("EndpointSlice", namespace)
            if slice_["metadata"]["labels"].get("kubernetes.io/service-name") == service
            for endpoint in slice_["endpoints"]
            if endpoint["conditions"]["ready"]
        ]

    def _answer(self, query: bytes) -> bytes:
        name, end = _read_name(query)
        kind, _ = struct.unpack_from("!HH", query, end)
        addresses = self.resolve(name)
        records = (addresses or []) if kind == _A else []
        flags = 0x8180 | (_NO_SUCH_NAME if addresses is None else 0)
        header = query[:2] + struct.pack("!HHHHH", flags, 1, len(records), 0, 0)
        answer = header + query[12 : end + 4]
        for address in records:
            answer += struct.pack("!HHHIH", 0xC00C, _A, _IN, 0, 4)
            answer += ipaddress.IPv4Address(address).packed
        return answer


def _read_name(query: bytes) -> tuple[str, int]:
    """Returns the asked name, and where it ends."""
    labels, at = [], 12
    while size := query[at]:
        labels.append(query[at + 1 : at + 1 + size].decode("ascii", "replace").lower())
        at += 1 + size
    return ".".join(labels), at + 1
