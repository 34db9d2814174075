"""Reaches nodes by HTTP libraries that the router could use in place of its own connections, so
that benches can say what each costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import aiohttp
import httpx

from router.errors import NodeLost, NodeUnreachable
from router.nodes.http_answer import Take
from router.nodes.transport import Transport


class _Response:
    """Gives pieces of a body to whoever takes them, one wake-up of a task for each."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]

    async def read_chunk(self) -> bytes:
        raise NotImplementedError

    async def stream(self, take: Take) -> bool:
        while chunk := await self.read_chunk():
            if not take(chunk):
                return False
        return True

    def close(self) -> None:
        """Does nothing: the streams of benches all end by themselves."""


class _HttpxResponse(_Response):
    def __init__(self, response: httpx.Response) -> None:
        self._chunks = response.aiter_raw()
        self.status = response.status_code
        self.headers = response.headers.raw

    async def read_chunk(self) -> bytes:
        try:
            return await anext(self._chunks, b"")
        except httpx.HTTPError as error:
            raise NodeLost(str(error)) from error


class HttpxTransport:
    async def open(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
    ) -> _Response:
        request = self._client.build_request(method, url, headers=dict(headers), content=body)
        try:
            return _HttpxResponse(await self._client.send(request, stream=True))
        except httpx.ConnectError as error:
            raise NodeUnreachable(str(error)) from error

    async def close(self) -> None:
        await self._client.aclose()


class _AiohttpResponse(_Response):
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = response.raw_headers

    async def read_chunk(self) -> bytes:
        try:
            return await self._response.content.readany()
        except aiohttp.ClientError as error:
            raise NodeLost(str(error)) from error

    def close(self) -> None:
        self._response.close()


class AiohttpTransport:
    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
    ) -> _Response:
        try:
            answer = await self._session.request(method, url, data=body or None, headers=headers)
        except aiohttp.ClientError as error:
            raise NodeUnreachable(str(error)) from error
        return _AiohttpResponse(answer)

    async def close(self) -> None:
        await self._session.close()


def make_transport(client: str) -> Transport | None:
    """Returns None for the router's own."""
    if client == "httpx":
        return HttpxTransport()
    return AiohttpTransport() if client == "aiohttp" else None
