"""Images are fetched from allowed hosts on the public network, and a node cannot be made to look
anywhere else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from urllib.parse import quote

import pytest
import pytest_asyncio
from aiohttp import web

from decode_node.errors import Overloaded
from decode_node.images.encoded_room import EncodedRoom
from decode_node.images.fetch import AllowedHosts, ImageFetcher, is_public
from decode_node.images.preprocess import ImageError

HOSTS = AllowedHosts.of("img.example.com, *.cdn.example.com, odd.example.com:8443")
PUBLIC = "93.184.216.34"


def uncounted(num_bytes: int) -> None:
    """Has room for any number of bytes."""


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
    "fec0::1",
    "3fff::1",
    "5f00::1",
    "64:ff9b:1::1",
    "192.0.0.8",
    "192.88.99.1",
    "::ffff:169.254.169.254",
    "::127.0.0.1",
    "2002:a9fe:a9fe::1",
    "64:ff9b::a9fe:a9fe",
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
        await fetcher_of(resolve=resolve).fetch(url, uncounted)
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
            await fetcher_of(*addresses).fetch("http://img.example.com/a.png", uncounted)
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
    assert await fetcher.fetch(f"{base}/a.png", uncounted) == CONTENT
    assert await fetcher.fetch(f"{base}/to/there?url=/a.png", uncounted) == CONTENT


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
        await local_fetcher(port).fetch(f"http://odd.example.com:{port}{path}", uncounted)
    assert "secret is" not in str(caught.value) and "127.0.0.1" not in str(caught.value)


async def test_bytes_count_as_they_come_and_until_they_are_decoded(port: int) -> None:
    room, url = EncodedRoom(100_000), f"http://odd.example.com:{port}"
    fetcher = local_fetcher(port, max_bytes=1 << 30)
    with room.held() as hold:
        await fetcher.fetch(f"{url}/a.png", hold)
        assert room.num_bytes == len(CONTENT)
        with pytest.raises(Overloaded, match="too many images and videos"), room.held() as other:
            await fetcher.fetch(f"{url}/endless", other)
        assert room.num_bytes == len(CONTENT)
    assert room.num_bytes == 0


async def test_time_is_limited(port: int) -> None:
    with pytest.raises(ImageError, match=r"within 0\.2 s"):
        await local_fetcher(port, timeout_s=0.2).fetch(
            f"http://odd.example.com:{port}/slow", uncounted
        )


async def test_the_address_that_was_checked_is_dialled(port: int) -> None:
    """The name stands for something else the second time it is asked for: nobody asks."""
    asked = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["10.0.0.1"]

    fetcher = local_fetcher(port, resolve=resolve)
    assert await fetcher.fetch(f"http://odd.example.com:{port}/a.png", uncounted) == CONTENT
    assert asked == ["odd.example.com"]


class NameServer:
    """Stands for what the system's resolver asks: a name has a CNAME, or addresses that may be
    others at each question."""

    def __init__(self, names: dict[str, str | list[list[str]]]) -> None:
        self._names = names
        self.asked: list[str] = []

    async def look_up(self, host: str, port: int) -> list[tuple[object, ...]]:
        self.asked.append(host)
        answer = self._names[host]
        while isinstance(answer, str):
            answer = self._names[answer]
        addresses = answer.pop(0) if len(answer) > 1 else answer[0]
        return [
            (family, socket.SOCK_STREAM, 6, "", where)
            for address in addresses
            for family, where in [
                (socket.AF_INET6, (address, port, 0, 0))
                if ":" in address
                else (socket.AF_INET, (address, port))
            ]
        ]


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Notes where connections would be made; none is."""
    found: list[tuple[object, ...]] = []

    async def connect(addr_infos: Sequence[tuple[object, ...]], **_: object) -> object:
        found.extend(info[4] for info in addr_infos)  # type: ignore[misc]
        raise OSError("nobody is there")

    monkeypatch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", connect)
    return found


METADATA, LOOPBACK = "169.254.169.254", "127.0.0.1"


@pytest.mark.parametrize(
    "names",
    [
        {"img.example.com": [[METADATA]]},
        {"img.example.com": [[PUBLIC, METADATA]]},
        {"img.example.com": "a.other", "a.other": "b.other", "b.other": [[LOOPBACK]]},
        {"img.example.com": [["::ffff:127.0.0.1"]]},
        {"img.example.com": [["::ffff:a9fe:a9fe"]]},
        {"img.example.com": [["64:ff9b::7f00:1"]]},
        {"img.example.com": [["fe80::1%lo"]]},
        {"img.example.com": [["2606:2800:220:1::1", "fd00::1"]]},
    ],
)
async def test_names_that_lead_into_the_network_are_refused_and_nobody_is_dialled(
    monkeypatch: pytest.MonkeyPatch,
    dialled: list[tuple[object, ...]],
    names: dict[str, str | list[list[str]]],
) -> None:
    server = NameServer(names)
    monkeypatch.setattr("decode_node.images.fetch.look_up", server.look_up)
    with pytest.raises(ImageError, match="not on the public network"):
        await ImageFetcher(HOSTS, max_bytes=1000, timeout_s=5.0).fetch(
            "http://img.example.com/a.png", uncounted
        )
    assert (server.asked, dialled) == (["img.example.com"], [])


@pytest.mark.parametrize("second", [METADATA, LOOPBACK, "::ffff:127.0.0.1"])
async def test_a_name_that_is_another_at_the_second_question_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, dialled: list[tuple[object, ...]], second: str
) -> None:
    """Rebinding: public while it is checked, and private when it is dialled."""
    server = NameServer({"img.example.com": [[PUBLIC], [second]]})
    monkeypatch.setattr("decode_node.images.fetch.look_up", server.look_up)
    with pytest.raises(ImageError, match="cannot be fetched"):
        await ImageFetcher(HOSTS, max_bytes=1000, timeout_s=5.0).fetch(
            "http://img.example.com/a.png", uncounted
        )
    assert server.asked == ["img.example.com"]
    assert dialled == [(PUBLIC, 80)]


async def test_each_step_of_a_redirect_is_looked_up_and_checked_anew(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    """The host is allowed and public at first; it sends the node to itself, and is another one."""
    seen: list[str] = []

    def is_allowed(address: str) -> bool:
        seen.append(address)
        return address == LOOPBACK

    name = "odd.example.com"
    server = NameServer({name: [[LOOPBACK], [LOOPBACK], [METADATA]]})
    monkeypatch.setattr("decode_node.images.fetch.look_up", server.look_up)
    fetcher = ImageFetcher(
        AllowedHosts.of(f"{name}:{port}"),
        max_bytes=100_000,
        timeout_s=5.0,
        is_allowed_address=is_allowed,
    )
    with pytest.raises(ImageError, match="not on the public network"):
        await fetcher.fetch(f"http://{name}:{port}/to/x?url=/to/y?url=/a.png", uncounted)
    assert seen == [LOOPBACK, LOOPBACK, METADATA] and server.asked == [name] * 3


@pytest.mark.parametrize(
    "target",
    ["file:///etc/passwd", "gopher://127.0.0.1:6379/x", "ftp://odd.example.com/", "//127.0.0.1/",
     "http://127.0.0.1:1/", "http://[::1]/", "http://[::ffff:7f00:1]/", "http://2130706433/",
     "http://0x7f.1/", "http://odd.example.com:6379/", "http://odd.example.com.evil.com/",
     "http://user@odd.example.com/", "\\\\127.0.0.1\\x", "http://odd。example。com/"],
)  # fmt: skip
async def test_redirects_to_other_places_are_not_followed(port: int, target: str) -> None:
    url = f"http://odd.example.com:{port}/to/x?url={quote(target, safe='')}"
    with pytest.raises(ImageError):
        await local_fetcher(port).fetch(url, uncounted)
