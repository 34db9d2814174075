"""Images are fetched from allowed hosts on the public network, and a node cannot be made to look
anywhere else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
from aiohttp import web

from decode_node.images.fetch import AllowedHosts, ImageFetcher, is_public
from decode_node.images.preprocess import ImageError

HOSTS = AllowedHosts.of("img.example.com, *.cdn.example.com, odd.example.com:8443")
PUBLIC = "93.184.216.34"
CONTENT = b"the image" * 1000

REFUSED_URLS = [
    "http://127.0.0.1/a.png",
    "http://[::1]/a.png",
    "http://169.254.169.254/latest/meta-data/",
    "http://localhost/a.png",
    "http://2130706433/a.png",
    "http://0x7f000001/a.png",
    "http://evil.com/img.example.com",
    "http://img.example.com.evil.com/a.png",
    "http://evilimg.example.com/a.png",
    "http://cdn.example.com/a.png",
    "http://img.example.com:22/a.png",
    "https://img.example.com:80/a.png",
    "https://odd.example.com/a.png",
    "http://img.example.com@127.0.0.1/a.png",
    "http://user:word@img.example.com/a.png",
    "http://127.0.0.1#@img.example.com/a.png",
    "http://img.example.com\\@127.0.0.1/a.png",
    "http://img.example.com\r\nhost: evil/a.png",
    "http://img.exаmple.com/a.png",
    "file:///etc/passwd",
    "ftp://img.example.com/a.png",
    "gopher://img.example.com/a.png",
    "http:///a.png",
    "http://img.example.com:port/a.png",
    "http://img.example.com/" + "a" * 5000,
]
PRIVATE = [
    "127.0.0.1",
    "10.0.0.8",
    "172.16.3.4",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "255.255.255.255",
    "240.0.0.1",
    "::1",
    "::",
    "fe80::1%eth0",
    "fc00::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "2002:7f00:1::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "not an address",
]


def fetcher_of(*addresses: str, **changes: object) -> ImageFetcher:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return addresses

    settings = {"max_bytes": 100_000, "timeout_s": 5.0, "resolve": resolve, **changes}
    return ImageFetcher(HOSTS, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", REFUSED_URLS)
async def test_refused_before_anything_is_resolved(url: str) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        raise AssertionError(f"resolved {host}")

    with pytest.raises(ImageError) as caught:
        await fetcher_of(resolve=resolve).fetch(url)
    assert "127.0.0.1" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://img.example.com/a.png",
        "https://IMG.example.com:443/a.png?x=1",
        "https://a.b.cdn.example.com/a.png",
        "https://odd.example.com:8443/a.png",
        "http://img.example.com./a.png",
    ],
)
async def test_allowed_hosts(url: str) -> None:
    fetcher_of().checked(url)


@pytest.mark.parametrize("address", PRIVATE)
async def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)
    for addresses in ((address,), (PUBLIC, address)):
        with pytest.raises(ImageError, match="not on the public network") as caught:
            await fetcher_of(*addresses).fetch("http://img.example.com/a.png")
        assert address not in str(caught.value)


async def test_public_addresses() -> None:
    assert is_public(PUBLIC) and is_public("2606:2800:220:1::1")


@pytest_asyncio.fixture
async def port() -> AsyncIterator[int]:
    """Returns the port of a server on loopback that answers for every allowed host."""

    async def answer(request: web.Request) -> web.StreamResponse:
        path = request.path
        if path == "/slow":
            await asyncio.sleep(30)
        if path.startswith("/to/"):
            raise web.HTTPFound(request.query["url"])
        if path == "/loop":
            raise web.HTTPFound("/loop")
        if path == "/secret":
            return web.Response(status=403, text="the secret is 42")
        if path == "/zip":
            return web.Response(body=CONTENT, headers={"content-encoding": "gzip"})
        if path == "/endless":
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(bytes(50_000))
        assert request.host.startswith("odd.example.com")
        return web.Response(body=CONTENT)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    await runner.cleanup()


def local_fetcher(port: int, **changes: object) -> ImageFetcher:
    hosts = AllowedHosts.of(f"odd.example.com:{port}")

    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    settings = {"max_bytes": 100_000, "timeout_s": 5.0, "resolve": resolve, **changes}
    return ImageFetcher(hosts, is_allowed_address=lambda address: True, **settings)  # type: ignore[arg-type]


async def test_what_a_host_has_under_its_own_name(port: int) -> None:
    fetcher = local_fetcher(port)
    base = f"http://odd.example.com:{port}"
    assert await fetcher.fetch(f"{base}/a.png") == CONTENT
    assert await fetcher.fetch(f"{base}/to/there?url=/a.png") == CONTENT


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/loop", "more than 3 times"),
        ("/to/x?url=http://127.0.0.1/", "host or a port"),
        ("/to/x?url=http://odd.example.com:22/", "host or a port"),
        ("/to/x?url=file:///etc/passwd", "must be a data:, https: or http: URL"),
        ("/secret", "is not what its host answers with"),
        ("/endless", "more than 100000 bytes"),
        ("/zip", "compressed"),
    ],
)
async def test_what_a_host_may_not_do(port: int, path: str, words: str) -> None:
    with pytest.raises(ImageError, match=words) as caught:
        await local_fetcher(port).fetch(f"http://odd.example.com:{port}{path}")
    assert "secret is" not in str(caught.value) and "127.0.0.1" not in str(caught.value)


async def test_time_is_limited(port: int) -> None:
    with pytest.raises(ImageError, match=r"within 0\.2 s"):
        await local_fetcher(port, timeout_s=0.2).fetch(f"http://odd.example.com:{port}/slow")


async def test_the_address_that_was_checked_is_dialled(port: int) -> None:
    """The name stands for something else the second time it is asked for: nobody asks."""
    asked = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["10.0.0.1"]

    fetcher = local_fetcher(port, resolve=resolve)
    assert await fetcher.fetch(f"http://odd.example.com:{port}/a.png") == CONTENT
    assert asked == ["odd.example.com"]
