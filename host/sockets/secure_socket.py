"""ZeroMQ sockets between the hosts of one engine: TCP, encrypted, for holders of its key only.

    engine core                                    process on another host
    1. `LinkKey.create`, `listen` on the           2. `HostLink` in its configuration
       address of this host in the cluster         3. `connect_secure`, or `listen` itself

CURVE (elliptic-curve encryption with a new session key for each connection) is ZeroMQ's own.
Its first message can only be written by one that knows the listener's long-term key. The key
never travels over these sockets, and every engine has a new one; so a process that was not given it
cannot begin. Nothing listens on an address but the one that is named.
"""

from __future__ import annotations

import msgspec
import zmq

from host.sockets.local_socket import Context, new_socket

_HEARTBEAT_MS = 10_000
_HEARTBEAT_TIMEOUT_MS = 60_000
"""Keeps idle connections known to whatever is on the way, and ends those to a host that is gone."""


class LinkKey(msgspec.Struct, frozen=True, kw_only=True):
    """A CURVE key pair that all processes of one engine share. To be kept secret, both parts."""

    public: str
    secret: str

    @classmethod
    def create(cls) -> LinkKey:
        public, secret = zmq.curve_keypair()
        return cls(public=public.decode(), secret=secret.decode())

    def __repr__(self) -> str:
        """Logs may show a configuration, but never its key."""
        return "LinkKey(...)"


class HostLink(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine core and the processes on another host find and trust each other.

    Attributes:
        core_address: Of the engine core's host, as the other host sees it.
        host_address: Of the other host.
    """

    core_address: str
    host_address: str
    key: LinkKey


def listen(socket: zmq.Socket[bytes], host: str, key: LinkKey) -> str:
    """Lets `socket` listen on a free port of `host`, besides what it listens on already.
    Returns the address for `connect_secure`.

    Raises:
        zmq.ZMQError: `host` is not an address of this machine.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, key.secret)
    _prepare(socket, host)
    socket.bind(f"tcp://{_bracketed(host)}:*")
    address: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return address.rstrip("\0")


def connect_secure(
    context: Context, kind: zmq.SocketType, address: str, key: LinkKey, identity: bytes = b""
) -> zmq.Socket[bytes]:
    """Returns a connected socket. The other side may listen later: messages wait until then."""
    socket = new_socket(context, kind)
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, key.public)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, key.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, key.secret)
    if identity:
        socket.setsockopt(zmq.ROUTING_ID, identity)
    _prepare(socket, address)
    socket.connect(address)
    return socket


def _prepare(socket: zmq.Socket[bytes], address: str) -> None:
    socket.setsockopt(zmq.IPV6, int("[" in _bracketed(address)))
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)


def _bracketed(host: str) -> str:
    """IPv6 addresses need brackets before a port."""
    return f"[{host}]" if host.count(":") > 1 and "[" not in host else host
