"""Is the one seam between the router and the nodes' HTTP servers.

`HttpTransport` is the real one. Bytes pass as they are: no decompression, no cookies, no
redirects. A reader that stops reading stops the node's sending, one socket buffer later.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Protocol

import aiohttp
from yarl import URL

from edge.address import join_address
from edge.security.config import PlaintextRefused, Role
from edge.security.credentials import Credentials
from router.errors import NodeLost, NodeUnreachable

_LARGE_BODY = 1 << 20
"""Bodies above this are written in pieces, so that copying one does not hold up the others."""


class UpstreamResponse(Protocol):
    """Is an answer whose head has arrived. Must be closed; closing early hangs up on the node."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]: ...

    async def read_chunk(self) -> bytes:
        """Returns what has arrived of the body; b"" at its end. Raises `NodeLost` if it breaks
        off."""

    @property
    def is_cut(self) -> bool:
        """Returns whether the connection has ended before the answer."""

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
        """

    async def close(self) -> None: ...


class HttpResponse:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Sequence[tuple[bytes, bytes]] = response.raw_headers

    async def read_chunk(self) -> bytes:
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise NodeLost(_describe(error)) from error
        except RuntimeError as error:
            if not self.is_cut:
                raise
            raise NodeLost("its answer is no HTTP any more") from error

    @property
    def is_cut(self) -> bool:
        """Returns whether the connection has ended before the answer. aiohttp ends it when what
        comes is no HTTP, and tells nobody who reads."""
        connection = self._response.connection
        if connection is None:
            return False
        transport = connection.transport
        return transport is None or transport.is_closing()

    def close(self) -> None:
        self._response.close()


class HttpTransport:
    """Uses aiohttp, chosen by measurement (`bench/router/overhead.py`). Whether it is HTTPS is
    for `credentials` to say, not for URLs."""

    def __init__(
        self,
        connect_timeout_s: float,
        read_timeout_s: float,
        keepalive_s: float,
        credentials: Credentials,
    ) -> None:
        self._credentials = credentials
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s
        )
        self._keepalive_s = keepalive_s
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive_s),
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
    ) -> HttpResponse:
        assert self._session is not None, "open() comes first"
        target = URL(url, encoded=True)
        try:
            self._credentials.check_dial(target.host or "")
        except PlaintextRefused as error:
            raise NodeUnreachable(str(error)) from error
        address = join_address(target.host or "", target.port or 0)
        await self._credentials.meet(address)
        tls = self._credentials.client_context(address)
        try:
            response = await self._session.request(
                method,
                target if tls is None else target.with_scheme("https"),
                data=io.BytesIO(body) if len(body) > _LARGE_BODY else (body or None),
                headers={**headers, **dict(self._credentials.metadata())},
                allow_redirects=False,
                ssl=True if tls is None else tls,
                server_hostname=self._credentials.server_name(Role.DECODE),
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NodeUnreachable(_describe(error)) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise NodeLost(_describe(error)) from error
        return HttpResponse(response)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
