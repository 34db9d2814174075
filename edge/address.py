"""Reads and writes `host:port`, the same for names, IPv4 and IPv6 (`[::1]:8000`)."""

from __future__ import annotations

import ipaddress

_MAX_PORT = 65535


def join_address(host: str, port: int) -> str:
    """Joins host and port. An IPv6 address gets brackets, unless it has them."""
    return f"{bracketed(host)}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Returns host, without brackets, and port. Raises `ValueError`."""
    host, separator, digits = address.rpartition(":")
    name = host.removeprefix("[").removesuffix("]")
    is_port = digits.isascii() and digits.isdigit() and int(digits) <= _MAX_PORT
    if not (separator and name and is_port) or (":" in name) != host.startswith("["):
        raise ValueError(f"{address!r} is not host:port (IPv6: [address]:port)")
    return name, int(digits)


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def is_loopback(host: str) -> bool:
    """Returns whether nothing but this host can be there. Names other than localhost are not asked
    for."""
    name = host.removeprefix("[").removesuffix("]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return False
