"""Has the kernel end connections whose other end has vanished without a word: its host lost power,
a cable was cut, a firewall forgot the connection.

    data is out     nothing of it is acknowledged for `timeout_s`: the connection breaks. So it does
                    when the peer takes nothing for this long, its buffers full
    all is quiet    the kernel asks after half of `timeout_s`, and again; no answer: the same

What a server has written counts for nothing here, as up to a megabyte of it may lie in the kernel.
A listener's connections inherit what was set on it.
"""

from __future__ import annotations

import socket

_PROBES = 2


def set_silence_timeout(sock: socket.socket, timeout_s: float) -> None:
    """Sets when connections of this socket, or of those that it accepts, are given up."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(1000 * timeout_s)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # With a user timeout, which ends the probing, their number alone ends nothing.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(timeout_s / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(timeout_s / 4)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
