"""Which network interface an address belongs to, how fast it is, and how near to a GPU it sits.

What the kernel tells: `getifaddrs` for addresses, /sys for the rest. Where it tells nothing (a
container's virtual interface, a cloud's driver), interfaces are equally near and of unknown speed.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import socket
from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, Structure, c_char_p, c_uint, c_uint16, c_void_p
from pathlib import Path

SYS = Path("/sys")
UNKNOWN_DISTANCE = 4
_IP_BYTES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""Tells, by family, where the address begins in a sockaddr, and its length."""


class _IfAddrs(Structure):
    """struct ifaddrs."""


_IfAddrs._fields_ = (
    ("next", POINTER(_IfAddrs)),
    ("name", c_char_p),
    ("flags", c_uint),
    ("address", c_void_p),
    ("netmask", c_void_p),
    ("broadcast", c_void_p),
    ("data", c_void_p),
)


def interfaces_by_address() -> dict[str, str]:
    """Returns the name of the interface of each address of this host. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    found: dict[str, str] = {}
    try:
        entry = first
        while entry:
            address = _ip_of(entry.contents.address)
            if address:
                found[address] = entry.contents.name.decode()
            entry = entry.contents.next
    finally:
        libc.freeifaddrs(first)
    return found


def rdma_ports(sys: Path = SYS) -> list[str]:
    """Returns the ports of RDMA devices as UCX names them (`mlx5_0:1`)."""
    ports = sys.glob("class/infiniband/*/ports/*")
    return sorted(f"{port.parent.parent.name}:{port.name}" for port in ports)


def _ip_of(sockaddr: int | None) -> str:
    """Returns an empty text for other families than IP."""
    if not sockaddr:
        return ""
    family = c_uint16.from_address(sockaddr).value
    if family not in _IP_BYTES:
        return ""
    start, length = _IP_BYTES[socket.AddressFamily(family)]
    return socket.inet_ntop(family, ctypes.string_at(sockaddr + start, length))


def numeric(host: str) -> str:
    """Returns the first address of a name. Raises OSError (socket.gaierror) for one without."""
    infos = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    return str(infos[0][4][0])


class Network:
    """Knows how quick and how near a host's interfaces are.

    `addresses`: interface by address; `sys`: the root of /sys.
    """

    def __init__(self, addresses: Mapping[str, str] | None = None, sys: Path = SYS) -> None:
        self._addresses = interfaces_by_address() if addresses is None else addresses
        self._sys = sys

    def gb_per_s(self, hosts: Sequence[str]) -> float | None:
        """Returns what their interfaces carry together; None when one of them does not tell."""
        names = {self._addresses.get(numeric(host), "") for host in hosts}
        speeds = [self._speed(name) for name in names]
        return None if None in speeds else sum(speed for speed in speeds if speed)

    def nearest(self, hosts: Sequence[str], gpu: str) -> list[str]:
        """Returns those of `hosts` that are nearest to the GPU at this PCI address, in order; all
        of them when nothing is known, or for no GPU (empty)."""
        if not gpu:
            return list(hosts)
        distances = [self._distance(host, gpu) for host in hosts]
        return [host for host, far in zip(hosts, distances, strict=True) if far == min(distances)]

    def _distance(self, host: str, gpu: str) -> int:
        """Returns how far they are apart: 0 below the same PCI switch, 1 below the same root
        complex, 2 on the same NUMA node, 3 on another one, 4 unknown."""
        target = self._device(self._sys / "bus/pci/devices" / gpu.lower())
        sources = list(self._devices_of(self._addresses.get(numeric(host), "")))
        if target is None or not sources:
            return UNKNOWN_DISTANCE
        return min(_pci_distance(source, target) for source in sources)

    def _devices_of(self, interface: str) -> Iterator[Path]:
        """Yields its devices; those of a bond or VLAN are those of the interfaces below it."""
        if not interface:
            return
        folder = self._sys / "class/net" / interface
        device = self._device(folder / "device")
        if device is not None:
            yield device
            return
        for lower in sorted(folder.glob("lower_*")):
            yield from self._devices_of(lower.name.removeprefix("lower_"))

    def _device(self, link: Path) -> Path | None:
        return link.resolve() if link.exists() else None

    def _speed(self, interface: str) -> float | None:
        """Virtual interfaces name a speed that means nothing."""
        if not any(self._devices_of(interface)):
            return None
        try:
            megabits = int((self._sys / "class/net" / interface / "speed").read_text())
        except (OSError, ValueError):
            return None
        return megabits / 8000 if megabits > 0 else None


def _pci_distance(a: Path, b: Path) -> int:
    """Both below /sys/devices/pci<domain>:<bus>/…"""
    shared = 0
    for one, other in zip(_pci_path(a), _pci_path(b), strict=False):
        if one != other:
            break
        shared += 1
    if shared > 1:
        return 0
    if shared > 0:
        return 1
    node = _numa_node(a)
    return 2 if node is not None and node == _numa_node(b) else 3


def _pci_path(device: Path) -> list[str]:
    """Returns root complex, root port, bridges and the device itself."""
    parts = list(device.parts)
    start = next((i for i, part in enumerate(parts) if part.startswith("pci")), len(parts))
    return parts[start:]


def _numa_node(device: Path) -> int | None:
    try:
        node = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
