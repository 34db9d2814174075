"""Makes the two calls to the Kubernetes API that a watch needs, and no others.

Token and certificate authority are files that the kubelet renews, so they are read again for each
call. Outside a cluster (no token file) the API is asked without a token.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult

from edge.address import look_up
from edge.silent_peers import set_silence_timeout
from router.kubernetes.endpoint_slices import EndpointSlice, Metadata

_MAX_EVENT_BYTES = 16 << 20
_CONNECT_S = 5.0
_LIST_S = 15.0
_SILENCE_S = 30.0
"""Seconds after which a watch breaks on whose connection the API's kernel says nothing: networks
forget connections that are quiet, and it would see no change for minutes."""
_GONE = 410


class ApiUnavailable(Exception):
    """The API could not be reached or refused; the message says how."""


class VersionExpired(Exception):
    """Raised when the API no longer knows what happened since: list again."""


class SliceList(msgspec.Struct):
    metadata: Metadata
    items: list[EndpointSlice]


class WatchEvent(msgspec.Struct):
    """Is one change; `type` is ADDED, MODIFIED, DELETED or BOOKMARK."""

    type: str
    object: EndpointSlice


class _RawEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesAccess:
    """Reads `token`, `ca.crt` and `namespace` from the folder `credentials`."""

    url: str
    credentials: Path

    @property
    def namespace(self) -> str:
        """Returns our own namespace."""
        return self._read("namespace") or "default"

    def headers(self) -> dict[str, str]:
        token = self._read("token")
        return {"authorization": f"Bearer {token}"} if token else {}

    def tls(self) -> ssl.SSLContext | bool:
        """Returns the TLS context. Raises `ApiUnavailable` when the authority cannot be read."""
        authority = self.credentials / "ca.crt"
        if not authority.exists():
            return True
        try:
            return ssl.create_default_context(cafile=str(authority))
        except (OSError, ssl.SSLError) as error:
            raise ApiUnavailable(f"{authority}: {error}") from None

    def _read(self, name: str) -> str:
        try:
            return (self.credentials / name).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return ""


class _Names(AbstractResolver):
    """Asks in threads that no other name holds up."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=str(target[0]),
                port=port,
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, _, protocol, _, target in await look_up(host, port)
            if family in (socket.AF_UNSPEC, kind)
        ]

    async def close(self) -> None:
        """Does nothing."""


def _session(timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(resolver=_Names())
    return aiohttp.ClientSession(timeout=timeout, connector=connector)


class EndpointSliceApi:
    """Asks for the EndpointSlices of one service. An empty `namespace` is our own."""

    def __init__(self, access: KubernetesAccess, service: str, namespace: str = "") -> None:
        self._access = access
        place = namespace or access.namespace
        self._url = f"{access.url}/apis/discovery.k8s.io/v1/namespaces/{place}/endpointslices"
        self._query = {"labelSelector": f"kubernetes.io/service-name={service}"}

    async def list(self) -> SliceList:
        """Lists the slices; raises `ApiUnavailable`."""
        timeout = aiohttp.ClientTimeout(total=_LIST_S, connect=_CONNECT_S)
        try:
            async with (
                _session(timeout) as session,
                self._get(session, {}) as response,
            ):
                await _check(response)
                return msgspec.json.decode(await response.read(), type=SliceList)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            raise ApiUnavailable(_describe(error)) from None

    async def watch(self, version: str, seconds: int) -> AsyncIterator[WatchEvent]:
        """Yields changes after `version`, until the API ends it after about `seconds`.

        Raises `VersionExpired`, `ApiUnavailable`.
        """
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        timeout = aiohttp.ClientTimeout(total=seconds + _LIST_S, connect=_CONNECT_S)
        try:
            async with (
                _session(timeout) as session,
                self._get(session, query) as response,
            ):
                await _check(response)
                _break_when_lost(response)
                async for line in _lines(response.content):
                    yield _event(line)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            raise ApiUnavailable(_describe(error)) from None

    def _get(
        self, session: aiohttp.ClientSession, query: Mapping[str, str]
    ) -> aiohttp.client._RequestContextManager:
        return session.get(
            self._url,
            params={**self._query, **query},
            headers=self._access.headers(),
            ssl=self._access.tls(),
        )


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == _GONE:
        raise VersionExpired
    if response.status != 200:
        hint = {401: ": the token is not valid", 403: ": the service account needs get, list and "
                "watch on endpointslices"}.get(response.status, "")  # fmt: skip
        raise ApiUnavailable(f"status {response.status}{hint}")


def _break_when_lost(response: aiohttp.ClientResponse) -> None:
    connection = response.connection
    if connection is not None and connection.transport is not None:
        set_silence_timeout(connection.transport.get_extra_info("socket"), _SILENCE_S)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yields lines of any length; what is cut off at the end is left out."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(rest) > _MAX_EVENT_BYTES:
            raise ApiUnavailable("an event of the watch is too large")


def _event(line: bytes) -> WatchEvent:
    raw = msgspec.json.decode(line, type=_RawEvent)
    if raw.type == "ERROR":
        status = msgspec.json.decode(raw.object, type=_Status)
        if status.code == _GONE:
            raise VersionExpired
        raise ApiUnavailable(f"the watch failed with {status.code}: {status.message[:200]}")
    return WatchEvent(raw.type, msgspec.json.decode(raw.object, type=EndpointSlice))


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__
