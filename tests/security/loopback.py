"""Addresses of this machine that servers of tests listen on."""

from __future__ import annotations

import socket

import pytest


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


NEEDS_IPV6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
LOOPBACK_HOSTS = ("127.0.0.1", pytest.param("::1", marks=NEEDS_IPV6))
