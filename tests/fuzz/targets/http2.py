"""Our HTTP/2 ends of the KV path: what a peer sends ends its own connection, and nothing else."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Coroutine
from functools import cache
from typing import Any

from hpack import Decoder, Encoder, HPACKError
from hypothesis import strategies as st

from edge.h2 import frames as h2
from edge.h2.rpc_method import RpcMethod, ServerCall
from edge.h2.server import H2Server
from edge.security.credentials import Credentials
from kv_transfer.errors import KVTransferError
from kv_transfer.transports.stream.h2.pull_client import H2PullClient
from tandem_pb import kv_transfer_pb2 as pb
from tests.fuzz.damage import damaged
from tests.fuzz.target import Fault, Target, judged, same

_OPENING = h2.PREFACE + h2.settings_frame({})
_CALL = h2.request(1, "/t/Echo", "h", b"x")
_PATIENCE_S = 10.0
_FIELDS = st.lists(
    st.tuples(
        st.sampled_from(
            [":path", ":status", "grpc-status", "grpc-message", "te", "x", "authorization"]
        ),
        st.sampled_from(["/t/Echo", "200", "0", "5", "abc", "%zz", "é", ""]),
    ),
    max_size=5,
)


@st.composite
def _frame(draw: st.DrawFn) -> bytes:
    stream = draw(st.sampled_from([0, 1, 1, 1, 2, 3, 5, (1 << 31) - 1]))
    flags = draw(st.sampled_from([0, 0, 1, 4, 5, 8, 0x20, 0x2D, 0xFF]))
    match draw(st.sampled_from(["headers", "raw headers", "data", "settings", "window", "any"])):
        case "headers":
            return h2.headers(stream, draw(_FIELDS), draw(st.integers(0, 1)))
        case "raw headers":
            kind = draw(st.sampled_from([h2.FrameKind.HEADERS, h2.FrameKind.CONTINUATION]))
            block = Encoder().encode(draw(_FIELDS), huffman=draw(st.booleans()))
            return h2.frame(kind, flags, stream, block)
        case "data":
            message = struct.pack(
                ">BI",
                draw(st.sampled_from([0, 0, 1, 9])),
                draw(st.sampled_from([0, 1, 3, 64, 1 << 20, (1 << 32) - 1])),
            )
            return h2.frame(
                h2.FrameKind.DATA, flags, stream, message + draw(st.binary(max_size=90))
            )
        case "settings":
            pairs = draw(
                st.lists(
                    st.tuples(
                        st.integers(0, 9),
                        st.sampled_from(
                            [0, 1, 100, 16_384, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
                        ),
                    ),
                    max_size=4,
                )
            )
            body = b"".join(struct.pack(">HI", *pair) for pair in pairs)
            return h2.frame(
                h2.FrameKind.SETTINGS, flags & 1, draw(st.sampled_from([0, 0, 1])), body
            )
        case "window":
            size = draw(st.sampled_from([0, 1, 65_535, (1 << 31) - 1, 1 << 31]))
            return h2.frame(h2.FrameKind.WINDOW_UPDATE, 0, stream, struct.pack(">I", size))
    return h2.frame(draw(st.integers(0, 12)), flags, stream, draw(st.binary(max_size=40)))  # type: ignore[arg-type]


def _streams(opening: bytes) -> st.SearchStrategy[bytes]:
    frames = st.lists(_frame(), max_size=6).map(b"".join)
    return damaged(frames.map(lambda rest: opening + rest), 2)


async def _echo(request: bytes, call: ServerCall) -> bytes:
    return request


class _World:
    """One event loop for all inputs, with a server of ours, and one whose words are given."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.faults: list[Any] = []
        self.loop.set_exception_handler(lambda _, context: self.faults.append(context))
        self.words = b""
        self.port, self.liar = self.loop.run_until_complete(self._start())

    async def _start(self) -> tuple[int, int]:
        self.server = H2Server({"/t/Echo": RpcMethod(_echo, bytes, bytes)})
        self._lies = await asyncio.start_server(self._lie, "127.0.0.1", 0)
        return await self.server.listen("127.0.0.1", 0), self._lies.sockets[0].getsockname()[1]

    async def _lie(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(self.words)
            writer.write_eof()
            while await reader.read(1 << 16):
                pass
        except OSError:
            pass
        finally:
            writer.close()

    def run(self, what: Coroutine[Any, Any, None]) -> None:
        self.faults.clear()
        self.loop.run_until_complete(asyncio.wait_for(what, _PATIENCE_S))
        if self.faults:
            raise Fault(f"the loop has seen {self.faults[0]}")


@cache
def _world() -> _World:
    return _World()


async def _say(data: bytes) -> bytes:
    """Sends bytes to the server, and returns what it says until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", _world().port)
    try:
        writer.write(data)
        writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def _say_and_ask(data: bytes) -> None:
    await _say(data)
    reader, writer = await asyncio.open_connection("127.0.0.1", _world().port)
    writer.write(_OPENING + _CALL)
    said = b""
    while b"grpc-status" not in said:
        piece = await reader.read(1 << 16)
        if not piece:
            raise Fault("another peer has no answer")
        said += piece
    writer.close()


class _Sink:
    """Takes messages of 1 MiB at most, as a puller does."""

    def begin(self, head: bytes, num_bytes: int) -> list[memoryview]:
        if num_bytes > 1 << 20:
            raise KVTransferError("a message is longer than any may be")
        return [memoryview(bytearray(num_bytes - len(head)))] if num_bytes > len(head) else []

    def fill(self, part: memoryview) -> None:
        """Nothing is checked while it comes."""

    def end(self) -> None:
        """Has no use for what was said."""


async def _pull() -> None:
    client = H2PullClient(Credentials())
    try:
        await client.pull(f"127.0.0.1:{_world().liar}", 0, pb.PullRequest(), _Sink())
    finally:
        await client.close()


def _check_server(data: bytes) -> None:
    _world().run(_say_and_ask(data))


def _check_client(data: bytes) -> None:
    world = _world()
    world.words = data
    judged(lambda: world.run(_pull()), KVTransferError)


def _check_headers(data: bytes) -> None:
    """Header blocks, beside hpack's own decoder with the same bounds."""
    found = judged(lambda: h2.HeaderReader().begin(1, h2.END_HEADERS, data), h2.H2Error)
    if found is None:
        return
    try:
        theirs = dict(Decoder(h2.MAX_HEADER_BYTES).decode(data, raw=True))
    except HPACKError as error:
        raise Fault(f"hpack refuses it: {error}") from error
    same({k.encode("latin-1"): v.encode("latin-1") for k, v in found[0].items()}, theirs, "headers")


_BLOCKS = damaged(
    st.builds(lambda fields, huffman: Encoder().encode(fields, huffman), _FIELDS, st.booleans()), 3
)

TARGETS = [
    Target(
        name="http2_server",
        inputs=_streams(_OPENING),
        check=_check_server,
        examples=250,
    ),
    Target(
        name="http2_client",
        inputs=_streams(h2.settings_frame({})),
        check=_check_client,
        examples=200,
    ),
    Target(
        name="http2_headers",
        inputs=_BLOCKS,
        check=_check_headers,
        examples=600,
    ),
]
