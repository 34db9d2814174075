"""HTTP/1.1 as routers and decode nodes read it, beside h11: whatever both take for a request must
be the same request, or a proxy in front could be shown another one than we act on."""

from __future__ import annotations

import asyncio
import re
import struct
from typing import Any, cast

import h11
import uvicorn
from hypothesis import strategies as st
from uvicorn.server import ServerState

from edge.http.connection.guarded_protocol import ConnectionLimits, GuardedProtocol, guarded_class
from tests.fuzz.damage import damaged
from tests.fuzz.target import Fault, Target, same

Request = tuple[bytes, bytes, bytes]
"""Method, target, body."""
_LIMITS = ConnectionLimits(max_header_bytes=16 << 10)
_ROUNDS = 64

_NAMES = st.sampled_from(
    [
        "Host",
        "Content-Length",
        "content-length",
        "Transfer-Encoding",
        "Connection",
        "Expect",
        "Upgrade",
        "X-A",
        "Content-Length ",
        "Trailer",
        "Authorization",
        "TE",
        "Keep-Alive",
        "",
    ]
)
_VALUES = st.sampled_from(
    [
        "x",
        "0",
        "3",
        "5",
        "-1",
        "+3",
        "0x3",
        "3, 3",
        "3 3",
        "chunked",
        "Chunked",
        "gzip, chunked",
        "chunked, gzip",
        "identity",
        "close",
        "keep-alive",
        "upgrade",
        "h2c",
        "100-continue",
        "\t3",
        "18446744073709551616",
        "",
        "a\x0bb",
        "é",
    ]
)
_BODIES = st.sampled_from(
    [
        b"",
        b"abc",
        b"abcde",
        b"3\r\nabc\r\n0\r\n\r\n",
        b"3;x=y\r\nabc\r\n0\r\nA: b\r\n\r\n",
        b"0\r\n\r\n",
        b"03\r\nabc\r\n0\r\n\r\n",
        b"3\nabc\n0\n\n",
        b"fffffffffffffffff\r\n",
        b"0\r\n\r\nGET /second HTTP/1.1\r\nHost: x\r\n\r\n",
    ]
)


@st.composite
def _message(draw: st.DrawFn) -> bytes:
    method = draw(st.sampled_from(["GET", "POST", "PUT", "CONNECT", "OPTIONS", "get", "PRI"]))
    path = draw(st.sampled_from(["/", "/v1/models", "/a?b=c#d", "*", "http://x/y", "//x", "/%00"]))
    version = draw(st.sampled_from(["HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/1.2"]))
    headers = draw(st.lists(st.tuples(_NAMES, _VALUES), max_size=4))
    end = draw(st.sampled_from(["\r\n", "\r\n", "\r\n", "\n", "\r"]))
    lines = [f"{method} {path} {version}", "Host: x", *(f"{n}: {v}" for n, v in headers), "", ""]
    return end.join(lines).encode() + draw(_BODIES)


@st.composite
def _inputs(draw: st.DrawFn) -> bytes:
    """Two bytes say where the stream is cut; then requests in a row."""
    whole = b"".join(draw(st.lists(_message(), min_size=1, max_size=3)))
    return struct.pack("<H", draw(st.integers(1, 500))) + draw(damaged(st.just(whole), 3))


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.sent = bytearray()
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """The client is not there to see it."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Reads nothing by itself: bytes are given by hand."""

    def resume_reading(self) -> None:
        """Reads nothing by itself: bytes are given by hand."""


async def _ours(data: bytes, cut: int) -> tuple[list[Request], bytes]:
    """Returns the requests that an application was given whole, and what the client was sent."""
    seen: list[Request] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            event = await receive()
            if event["type"] != "http.request":
                return
            body += event["body"]
            more = event["more_body"]
        target = scope["raw_path"] + (
            b"?" + scope["query_string"] if scope["query_string"] else b""
        )
        seen.append((scope["method"].encode(), target, body))
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
        )
        await send({"type": "http.response.body", "body": b""})

    kind = guarded_class(_LIMITS)
    config = uvicorn.Config(app, http=kind, ws="none", log_config=None, lifespan="off")
    config.load()
    loop, faults = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda _, context: faults.append(context))
    protocol = cast(GuardedProtocol, kind(config, ServerState(), {}, loop))  # type: ignore[call-arg]
    transport = _Transport()
    protocol.connection_made(transport)
    for at in range(0, len(data), cut):
        if transport.is_closed:
            break
        protocol.data_received(data[at : at + cut])
        await asyncio.sleep(0)
    for _ in range(_ROUNDS):
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    for _ in range(4):
        await asyncio.sleep(0)
    if protocol.open_connections.by_address:
        raise Fault("a connection that has ended is still counted")
    if faults:
        raise Fault(f"the loop has seen {faults[0]}")
    return seen, bytes(transport.sent)


def _reference(data: bytes) -> list[Request]:
    """Returns the requests that h11 takes, up to the first that it does not."""
    reader = h11.Connection(h11.SERVER, max_incomplete_event_size=_LIMITS.max_header_bytes)
    reader.receive_data(data)
    found: list[Request] = []
    head, body = h11.Request(method="GET", target="/", headers=[("host", "x")]), b""
    try:
        while True:
            match reader.next_event():
                case h11.Request() as head:
                    body = b""
                case h11.Data(data=piece):
                    body += piece
                case h11.EndOfMessage():
                    found.append((head.method, head.target, body))
                    reader.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                    reader.send(h11.EndOfMessage())
                    if reader.our_state is not h11.DONE or reader.their_state is not h11.DONE:
                        return found
                    reader.start_next_cycle()
                case _:
                    return found
    except h11.ProtocolError:
        return found


def _check(data: bytes) -> None:
    if len(data) < 3:
        return
    cut = 1 + struct.unpack_from("<H", data)[0] % 500
    ours, _ = asyncio.run(_ours(data[2:], cut))
    for mine, theirs in zip(ours, _reference(data[2:]), strict=False):
        same(mine, (theirs[0], _path(theirs[1]), theirs[2]), "a request")


def _path(target: bytes) -> bytes:
    """Returns a target as applications are given it: without host and fragment."""
    whole = target.partition(b"#")[0]
    return re.sub(rb"^[^/?]*://[^/?]*", b"", whole)


TARGETS = [
    Target(name="http1", inputs=_inputs(), check=_check, examples=400),
]
