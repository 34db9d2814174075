"""Reads the bodies of requests that offer another protocol, which a server need not accept.

Java's client offers HTTP/2 with each request (`Upgrade: h2c`). The parser takes all that follows
such a head for the other protocol's, so another one goes on behind it:

    head with an offer ──first parser──▶ what follows ──second parser, behind a head that only says
                                                      how long the body is──▶ body, next requests
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import httptools

_FRAMING = (b"content-length", b"transfer-encoding")

Headers = Sequence[tuple[bytes, bytes]]


class ParserCallbacks(Protocol):
    """Records what a parser finds."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_chunk_header(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


def has_body(headers: Headers) -> bool:
    """Says whether a body follows. Names are in lower case."""
    return any(name in _FRAMING and value.strip(b" 0") for name, value in headers)


def length_of_body(headers: Headers) -> int:
    """Returns the length that a head says its body has; 0 for none, and for chunks. Names are in
    lower case, and the parser has found the length to be a number."""
    return next((int(value) for name, value in headers if name == b"content-length"), 0)


def parser_of_body(callbacks: ParserCallbacks, headers: Headers) -> httptools.HttpRequestParser:
    """Returns a parser that stands behind a request's head. Raises `httptools.HttpParserError`."""
    parser = httptools.HttpRequestParser(_BehindHead(callbacks))
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    framing = [name + b": " + value + b"\r\n" for name, value in headers if name in _FRAMING]
    parser.feed_data(b"".join((b"POST / HTTP/1.1\r\n", *framing, b"\r\n")))
    return parser


class _BehindHead:
    """Passes on what comes behind the first head, which nothing has sent."""

    def __init__(self, callbacks: ParserCallbacks) -> None:
        self._callbacks = callbacks
        self._is_first_head = True
        self.on_chunk_header = callbacks.on_chunk_header
        self.on_body = callbacks.on_body
        self.on_message_complete = callbacks.on_message_complete

    def on_message_begin(self) -> None:
        if not self._is_first_head:
            self._callbacks.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_first_head:
            self._callbacks.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_first_head:
            self._callbacks.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_first_head:
            self._callbacks.on_headers_complete()
        self._is_first_head = False
