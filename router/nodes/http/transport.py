"""Is the one seam between the router and the nodes' HTTP servers.

`HttpTransport` is the real one. Bytes pass as they are: no decompression, no cookies, no
redirects. A reader that stops reading stops the node's sending, one socket buffer later.

1. `request`  an idle connection to the node, or a new one; the answer comes on it
2. idle       a connection whose answer was whole is kept for `keepalive_s`
3. `close`    all connections are ended
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

from edge.acceptor import EXHAUSTED
from edge.address import join_address, look_up
from edge.security.config import PlaintextRefused, Role
from edge.security.credentials import Credentials
from edge.silent_peers import set_silence_timeout
from router.errors import NodeUnreachable, Overloaded
from router.nodes.http.http_answer import HttpAnswer, Take
from router.nodes.http.node_connection import NodeConnection

logger = logging.getLogger(__name__)

_NO_ROOM = "The router has no room for another connection. Try again shortly."
_SILENCE_S = 40.0
"""Seconds after which a connection breaks on which a node's kernel acknowledges nothing, however
long its answer may take: a network has lost it. So does one on which the node reads nothing for as
long: longer than one lets a body wait (`body_timeout_s`) by default, and where it is set to wait
longer, another node is asked meanwhile."""


async def _connect_any(
    new: Callable[[], NodeConnection],
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    name: str | None,
) -> tuple[asyncio.Transport, NodeConnection]:
    """Connects to the first address of a node that answers. Raises `OSError` or `UnicodeError`."""
    loop = asyncio.get_running_loop()
    *others, last = [_host_of(target) for *_, target in await look_up(host, port)]
    for one in others:
        with contextlib.suppress(OSError):
            return await loop.create_connection(new, one, port, ssl=tls, server_hostname=name)
    return await loop.create_connection(new, last, port, ssl=tls, server_hostname=name)


def _host_of(target: tuple[Any, ...]) -> str:
    """Returns an address with its interface, without which link-local ones lead nowhere."""
    host, _, *rest = target
    scope = rest[1] if len(rest) > 1 else 0
    return f"{host}%{scope}" if scope else str(host)


class UpstreamResponse(Protocol):
    """Is an answer whose head has arrived. Must be closed; closing early hangs up on the node."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]: ...

    async def stream(self, take: Take) -> bool:
        """Gives the body to `take`, piece by piece as it comes, on the stack that has read it.
        Returns True when it is complete, False when `take` wants no more for now: then it may be
        called again. Raises `NodeLost` if the body breaks off."""

    async def read_chunk(self) -> bytes:
        """Returns what has arrived of the body; b"" at its end. Raises `NodeLost` if it breaks
        off."""

    def close(self) -> None: ...


class Transport(Protocol):
    async def open(self) -> None:
        """Opens it, inside the event loop and before the first request."""

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
    ) -> UpstreamResponse:
        """Returns when the head of the answer is there.

        Raises:
            NodeUnreachable: no connection could be made.
            NodeLost: the connection broke before the head was complete.
            Overloaded: this router has no room for another connection.
        """

    async def close(self) -> None: ...


Place = tuple[str, int, ssl.SSLContext | None]
"""Is where a connection leads: host, port, and how it is secured."""


class HttpTransport:
    """Speaks HTTP/1.1 by httptools, chosen by measurement. Whether it is HTTPS is for `credentials`
    to say, not for URLs."""

    def __init__(
        self,
        connect_timeout_s: float,
        read_timeout_s: float,
        keepalive_s: float,
        credentials: Credentials,
    ) -> None:
        self._credentials = credentials
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._keepalive_s = keepalive_s
        self._open: set[NodeConnection] = set()
        self._idle: dict[Place, dict[NodeConnection, asyncio.TimerHandle]] = {}
        """The newest of each place is last."""

    async def open(self) -> None:
        """Does nothing: connections are made when they are wanted."""

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
    ) -> HttpAnswer:
        target = urlsplit(url)
        host, port = target.hostname or "", target.port or 0
        try:
            self._credentials.check_dial(host)
        except PlaintextRefused as error:
            raise NodeUnreachable(str(error)) from error
        address = join_address(host, port)
        await self._credentials.meet(address)
        place = host, port, self._credentials.client_context(address)
        connection = self._take_idle(place) or await self._connect(place)
        given = {**headers, **dict(self._credentials.metadata())}
        return await connection.ask(method, target.path, address, given, body)

    async def close(self) -> None:
        for connection in tuple(self._open):
            connection.abort()

    async def _connect(self, place: Place) -> NodeConnection:
        host, port, tls = place
        name = None if tls is None else self._credentials.server_name(Role.DECODE) or host
        new = partial(
            NodeConnection,
            self._read_timeout_s,
            partial(self._put_idle, place),
            partial(self._forget, place),
        )
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                transport, connection = await _connect_any(new, host, port, tls, name)
        except TimeoutError:
            raise NodeUnreachable(f"no connection within {self._connect_timeout_s:g} s") from None
        except (OSError, UnicodeError) as error:
            if isinstance(error, OSError) and error.errno in EXHAUSTED:
                logger.error("no connection to a node can be made: %s", error)
                raise Overloaded(_NO_ROOM) from error
            raise NodeUnreachable(f"{type(error).__name__}: {error}") from error
        set_silence_timeout(transport.get_extra_info("socket"), _SILENCE_S)
        self._open.add(connection)
        return connection

    def _take_idle(self, place: Place) -> NodeConnection | None:
        idle = self._idle.get(place)
        while idle:
            connection, expiry = idle.popitem()
            expiry.cancel()
            if connection.is_open:
                return connection
        return None

    def _put_idle(self, place: Place, connection: NodeConnection) -> None:
        expiry = asyncio.get_running_loop().call_later(self._keepalive_s, connection.abort)
        self._idle.setdefault(place, {})[connection] = expiry

    def _forget(self, place: Place, connection: NodeConnection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(place, {})
        if (expiry := idle.pop(connection, None)) is not None:
            expiry.cancel()
        if not idle:
            self._idle.pop(place, None)
