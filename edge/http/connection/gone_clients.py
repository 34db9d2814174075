"""Notices clients that have gone while nothing is read from them.

The event loop learns that a connection was reset when it reads. Of a client whose body waits for
room, or of which enough is here, nothing is read: what it sent would stay for as long as that
lasts, and clients that send, hang up and begin anew would have any number of bodies here. The
kernel knows which connections are no more, so it is asked now and then.
"""

from __future__ import annotations

import asyncio
import socket

_PAUSE_S = 0.1
_TCP_CLOSE = 7
"""The state of a connection that was reset, by `linux/tcp_states.h`."""


class GoneClients:
    """Is shared by the connections of one listener, in one event loop. Connections that nothing
    reads from are watched; those that are gone are aborted."""

    def __init__(self) -> None:
        self._watched: dict[asyncio.Transport, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, transport: asyncio.Transport) -> None:
        self._watched[transport] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_PAUSE_S, self._look)

    def forget(self, transport: asyncio.Transport) -> None:
        self._watched.pop(transport, None)

    def _look(self) -> None:
        self._timer = None
        for transport in [each for each in self._watched if _is_gone(each)]:
            self.forget(transport)
            transport.abort()
        if self._watched:
            self._timer = asyncio.get_running_loop().call_later(_PAUSE_S, self._look)


def _is_gone(transport: asyncio.Transport) -> bool:
    connection = transport.get_extra_info("socket")
    try:
        state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except (AttributeError, OSError):
        return transport.is_closing()  # This is no TCP, or no Linux.
    return bool(state[0] == _TCP_CLOSE)
