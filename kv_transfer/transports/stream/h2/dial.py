"""Opens connections to the transfer processes of peers."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from edge.address import look_up, split_address
from edge.h2.send_threads import Connection
from edge.h2.tls_socket import TlsSocket
from edge.security.config import PlaintextRefused, Role
from edge.security.credentials import Credentials
from kv_transfer.errors import PeerLost


async def dial(address: str, credentials: Credentials, source: str = "") -> Connection:
    """Returns a connection, by TLS if we have certificates (and the peer may not
    lack them), that does not block. `source`: our
    address to connect from, where it is of the same kind; empty: any. Raises `PeerLost`."""
    loop = asyncio.get_running_loop()
    reason: OSError = OSError("the name has no address")
    try:
        host, port = split_address(address)
        credentials.check_dial(host)
        infos = await look_up(host, port)
        sources = await _sources(source)
        await credentials.meet(address)
    except (OSError, ValueError, PlaintextRefused) as error:
        raise PeerLost(f"{address}: {error}") from error
    tls = credentials.client_context(address, h2=True)
    name = credentials.server_name(credentials.role_at(address, Role.PREFILL)) or host
    for family, kind, protocol, _, target in infos:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            if family in sources:
                sock.bind(sources[family])
            await loop.sock_connect(sock, target)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is None:
                return sock
            return await TlsSocket.connect(sock, tls, name)
        except OSError as error:
            sock.close()
            reason = error
        except BaseException:
            sock.close()
            raise
    raise PeerLost(f"{address}: {reason}") from reason


async def _sources(source: str) -> dict[int, tuple[Any, ...]]:
    """Returns addresses to bind to, by address family."""
    if not source:
        return {}
    infos = await look_up(source.strip("[]"), 0)
    return {family: target for family, _, _, _, target in infos}
