"""ZeroMQ sockets between the processes of one host.

Names of abstract sockets are visible to all on the host, so a binding socket accepts
processes of our own user only. No message is ever dropped: queues have no limit, and a process that
produces is held back by what it waits for (a ring slot, a step's result, an admitted request).
"""

from __future__ import annotations

import os

import zmq


class Context(zmq.Context[zmq.Socket[bytes]]):
    """A context of such sockets; its owner closes them and ends it.

    One that was lost, as by an error between the two, is left alone: pyzmq's own end waits for
    sockets of it that are still open, and where the collector of garbage finds both at once,
    nothing closes them any more (27.3).
    """

    def __del__(self) -> None:
        """Does nothing, so that no collection of garbage waits."""


_LINGER_MS = 2000
"""How long a closing process waits for its final messages to leave."""


def bind_socket(context: Context, kind: zmq.SocketType, address: str) -> zmq.Socket[bytes]:
    """Raises zmq.ZMQError when another process has this address."""
    socket = new_socket(context, kind)
    socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
    socket.bind(address)
    return socket


def connect_socket(context: Context, kind: zmq.SocketType, address: str) -> zmq.Socket[bytes]:
    """Returns a connected socket. The other side may bind later: messages wait until then."""
    socket = new_socket(context, kind)
    socket.connect(address)
    return socket


def new_socket(context: Context, kind: zmq.SocketType) -> zmq.Socket[bytes]:
    """Returns a socket without a limit of its queues, not connected yet."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    return socket
