"""Gets images and videos from hosts that the operator allows, and from nowhere else.

A URL comes from a client, so that the node must not be made to look into its own network:

    1. scheme, host and port are those that the operator named; no name and password
    2. the host is resolved once, and refused unless each of its addresses is public
    3. one of these is dialled, whatever the name stands for a moment later; the name is still what
       TLS and the request's head say
    4. redirects are followed by hand, at most three, each through 1 to 3 and never to plain HTTP
    5. bytes and time are limited while they arrive

Errors contain neither addresses nor what a host said: clients learn nothing of the network.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from decode_node.images.encoded_room import Hold
from decode_node.images.preprocess import ImageError
from edge.address import look_up

_MAX_REDIRECTS = 3
_MAX_URL = 4096
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        ("192.0.0.0/24", "192.88.99.0/24", "fec0::/10", "3fff::/20", "5f00::/16", "64:ff9b:1::/48"),
    )
)
"""Networks of old and new kinds that releases of Python know as public, or not yet at all."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """Hosts as an operator names them: `images.example.com`, `*.example.com` for all below it, and
    with a port where it is not the scheme's own."""

    names: frozenset[str]

    @classmethod
    def of(cls, text: str) -> AllowedHosts:
        """Reads a list with commas."""
        return cls(frozenset(part.strip().lower() for part in text.split(",") if part.strip()))

    def allow(self, host: str, port: int, scheme: str) -> bool:
        """Returns whether images may come from there."""
        end = "" if port == _PORTS[scheme] else f":{port}"
        names = {host + end}
        labels = host.split(".")
        names |= {"*." + ".".join(labels[i:]) + end for i in range(1, len(labels))}
        return not self.names.isdisjoint(names)


class ImageFetcher:
    """Fetches within limits. `resolve` and `is_allowed_address` are others in tests."""

    def __init__(
        self,
        hosts: AllowedHosts,
        *,
        max_bytes: int,
        timeout_s: float,
        resolve: Resolve | None = None,
        is_allowed_address: Callable[[str], bool] | None = None,
    ) -> None:
        self._hosts = hosts
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._resolve = resolve or _resolve
        self._is_allowed_address = is_allowed_address or is_public

    async def fetch(self, url: str, hold: Hold) -> bytes:
        """Returns what the URL has, whose bytes `hold` counts. Raises `ImageError`,
        `Overloaded`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                for _ in range(_MAX_REDIRECTS + 1):
                    found = await self._get(url, hold)
                    if isinstance(found, bytes):
                        return found
                    if url[:6].lower() == "https:" and found[:6].lower() != "https:":
                        raise ImageError("was redirected from https to plain http")
                    url = found
        except TimeoutError:
            raise ImageError(f"did not arrive within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, ImageError):
                raise
            raise ImageError("cannot be fetched from its host") from None
        raise ImageError(f"was redirected more than {_MAX_REDIRECTS} times")

    def checked(self, url: str) -> tuple[SplitResult, str, int]:
        """Returns a URL's parts, host and port. Raises `ImageError` unless it is allowed."""
        if len(url) > _MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
            raise ImageError("has a URL that is too long, or has characters that URLs have not")
        if "\\" in url:
            raise ImageError("has a backslash in its URL")
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            raise ImageError("has no valid URL") from None
        if parts.scheme not in _PORTS:
            raise ImageError("must be a data:, https: or http: URL")
        if parts.username is not None or parts.password is not None:
            raise ImageError("has a name or a password in its URL")
        port = _PORTS[parts.scheme] if port is None else port
        if not self._hosts.allow(host, port, parts.scheme):
            raise ImageError("is on a host or a port that images may not come from here")
        return parts, host, port

    async def _get(self, url: str, hold: Hold) -> bytes | str:
        """Returns the content, or where it is said to be."""
        _, host, port = self.checked(url)
        addresses = await self._resolve(host, port)
        if not addresses or not all(self._is_allowed_address(one) for one in addresses):
            raise ImageError("is on a host that is not on the public network")
        connector = aiohttp.TCPConnector(resolver=_Fixed(addresses[0]), force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector, auto_decompress=False) as session,
            session.get(
                url,
                allow_redirects=False,
                headers={"accept": "image/*, video/*", "accept-encoding": "identity"},
            ) as answer,
        ):
            if answer.status in _REDIRECTS and (target := answer.headers.get("location")):
                return urljoin(url, target)
            if answer.status != 200:
                raise ImageError("is not what its host answers with")
            return await self._content(answer, hold)

    async def _content(self, answer: aiohttp.ClientResponse, hold: Hold) -> bytes:
        if answer.headers.get("content-encoding", "identity").lower() != "identity":
            raise ImageError("is sent compressed by its host")
        found = bytearray()
        async for part in answer.content.iter_chunked(1 << 16):
            found += part
            if len(found) > self._max_bytes:
                raise ImageError(f"has more than {self._max_bytes} bytes")
            hold(len(part))
        return bytes(found)


def is_public(address: str) -> bool:
    """Returns whether an address is one of the public network, also inside another."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if inner is None and found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if found.teredo is not None:
            return False
        if inner is not None:
            found = inner
    if any(found in network for network in _NOT_PUBLIC if network.version == found.version):
        return False
    return found.is_global and not found.is_multicast and not found.is_reserved


async def _resolve(host: str, port: int) -> Sequence[str]:
    return [str(address[0]) for *_, address in await look_up(host, port)]


class _Fixed(AbstractResolver):
    """Answers with the one address that was checked."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        kind = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        return [
            ResolveResult(
                hostname=host,
                host=self._address,
                port=port,
                family=kind,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
        ]

    async def close(self) -> None:
        """Has nothing to close."""
