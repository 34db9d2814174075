"""A head that may be read in two ways ends its connection before anything acts on it."""

from __future__ import annotations

import pytest

from tests.edge.test_guarded_connections import KEY, read_end, service

GET = b"GET /x HTTP/1.1\r\n"
POST = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
HOST = b"host: a\r\n"
CHUNKS = b"2\r\n{}\r\n0\r\n\r\n"
LENGTH = b"content-length: 2\r\n"


def coded(coding: bytes) -> bytes:
    return POST + KEY + b"transfer-encoding: " + coding + b"\r\n\r\n" + CHUNKS


def with_line(line: bytes) -> bytes:
    return GET + HOST + line + KEY + b"\r\n"


REFUSED = {
    "no host": (GET + KEY + b"\r\n", 400, "invalid_http"),
    "two hosts": (with_line(HOST), 400, "invalid_http"),
    "a host with a space": (GET + b"host: a b\r\n" + KEY + b"\r\n", 400, "invalid_http"),
    "a host with a path": (GET + b"host: a/b\r\n" + KEY + b"\r\n", 400, "invalid_http"),
    "another coding": (coded(b"gzip, chunked"), 501, "unsupported_transfer_encoding"),
    "another coding alone": (coded(b"gzip"), 400, "invalid_http"),
    "no coding": (coded(b"identity"), 400, "invalid_http"),
    "a longer name": (coded(b"xchunked"), 400, "invalid_http"),
    "chunks in the midst": (coded(b"chunked, gzip"), 400, "invalid_http"),
    "chunks twice": (coded(b"chunked, chunked"), 400, "invalid_http"),
    "chunks with a parameter": (coded(b"chunked;q=1"), 400, "invalid_http"),
    "chunks and a tab": (coded(b"chunked\t"), 400, "invalid_http"),
    "an empty coding": (coded(b", chunked"), 400, "invalid_http"),
    "chunks of HTTP/1.0": (coded(b"chunked").replace(b"/1.1", b"/1.0"), 400, "invalid_http"),
    "an unread body": (with_line(b"transfer-encoding: gzip\r\n"), 400, "invalid_http"),
    "one length twice": (POST + KEY + LENGTH * 2 + b"\r\n{}", 400, "invalid_http"),
    "a list of lengths": (POST + KEY + b"content-length: 2, 2\r\n\r\n{}", 400, "invalid_http"),
    "a length with a sign": (POST + KEY + b"content-length: +2\r\n\r\n{}", 400, "invalid_http"),
    "a length and chunks": (
        POST + KEY + LENGTH + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS,
        400,
        "invalid_http",
    ),
    "a folded line": (with_line(b"x-a: b\r\n c\r\n"), 400, "invalid_http"),
    "a carriage return alone": (with_line(b"x-a: b\rc\r\n"), 400, "invalid_http"),
    "a line feed alone": (with_line(b"x-a: b\nx-c: d\r\n"), 400, "invalid_http"),
    "a space before a colon": (with_line(b"x-a : b\r\n"), 400, "invalid_http"),
    "no name": (with_line(b": b\r\n"), 400, "invalid_http"),
    "HTTP/2.0": (with_line(b"").replace(b"/1.1", b"/2.0"), 505, "unsupported_http_version"),
    "HTTP/0.9": (b"GET /x\r\n\r\n", 505, "unsupported_http_version"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_doubtful_head_is_refused_before_anything_acts_on_it(case: str) -> None:
    sent, status, code = REFUSED[case]
    async with service() as running:
        reader, writer = await running.connect(sent)
        answer = await read_end(reader)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b'"code":"%b"' % code.encode() in answer
        assert not running.asked
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        with_line(b""),
        GET + b"host:\r\n" + KEY + b"\r\n",
        GET + b"host: [::1]:8000\r\n" + KEY + b"\r\n",
        GET + b"HOST: Router.example:80\r\n" + KEY + b"\r\n",
        b"GET /x HTTP/1.0\r\n" + KEY + b"\r\n",
        coded(b"chunked"),
        coded(b"Chunked"),
        GET + b"host:  a \r\n" + KEY.replace(b"\r", b" \r") + b"\r\n",
        POST + KEY + LENGTH.replace(b"\r", b" \r") + b"\r\n{}",
        coded(b"chunked "),
    ],
    ids=[
        "name", "none named", "IPv6", "capitals", "HTTP/1.0", "chunks", "chunks, capital",
        "blanks", "a blank behind a length", "chunks and a blank",
    ],
)  # fmt: skip
async def test_a_plain_head_is_answered(sent: bytes) -> None:
    async with service() as running:
        reader, writer = await running.connect(sent)
        assert b" 200 OK\r\n" in await reader.readuntil(b"ok")
        assert running.asked == [("/x", "somebody")]
        writer.close()
