"""Requests are cut where they end, wherever the reads that brought them do."""

from __future__ import annotations

import itertools
import re

import httptools
from hypothesis import given
from hypothesis import strategies as st

from edge.http.connection.bounded_reads import ReadRoom
from edge.http.connection.offered_protocol import length_of_body
from edge.http.connection.request_cutter import RequestCutter


class Heard:
    """Parses what a cutter gives, and notes which pieces go beyond the end of a request."""

    def __init__(self, cutter: RequestCutter) -> None:
        self.cutter = cutter
        self.parser = httptools.HttpRequestParser(self)
        self.bodies: list[bytes] = []

    def on_message_begin(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.cutter.body_bytes = length_of_body(self.headers)

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.bodies.append(self.body)


PARTS = st.lists(st.sampled_from([b"x", b"\r\n", b"\r\n\r\n", b"y" * 50]), max_size=6).map(b"".join)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Draws a request and its body."""
    body = draw(PARTS)
    if draw(st.booleans()):
        return b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (
            len(body),
            body,
        ), body
    size = draw(st.integers(1, 9))
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    trailers = b"a: b\r\n" if draw(st.booleans()) else b""
    head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + framed + b"0\r\n" + trailers + b"\r\n", body


@given(asked=st.lists(requests(), min_size=1, max_size=4), cuts=st.lists(st.integers(0, 600)))
def test_no_piece_goes_beyond_a_request(asked: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    sent = b"".join(request for request, _ in asked)
    ends = list(itertools.accumulate(len(request) for request, _ in asked))
    cutter = RequestCutter(ReadRoom())
    heard, num_parsed = Heard(cutter), 0
    edges = [0, *sorted({cut for cut in cuts if cut < len(sent)}), len(sent)]
    for start, stop in itertools.pairwise(edges):
        cutter.add(sent[start:stop])
        while cutter:
            before = len(heard.bodies)
            piece = cutter.next_piece()
            heard.parser.feed_data(piece)
            num_parsed += len(piece)
            if len(heard.bodies) > before:
                assert num_parsed == ends[before]
    assert heard.bodies == [body for _, body in asked]


def test_a_thousand_requests_in_one_read_are_a_thousand_pieces() -> None:
    request = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
    cutter = RequestCutter(ReadRoom())
    cutter.add(request * 1000)
    assert [cutter.next_piece() for _ in range(1000)] == [request] * 1000
    assert not cutter
    cutter.add(request)
    cutter.drop()
    assert not cutter


def test_tiny_chunks_are_parsed_in_small_pieces() -> None:
    cutter = RequestCutter(ReadRoom())
    cutter.add(re.sub(rb".", rb"1\r\nx\r\n", b"." * 40_000))
    assert max(len(cutter.next_piece()) for _ in range(50)) <= 4096
