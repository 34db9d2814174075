"""Says which requests no application gets, by how their heads are written, and what goes over the
wire in answer.

What is in front of us may read a doubtful head otherwise than we do: then one of both takes a part
of a body for a request. The parser refuses what breaks the grammar of HTTP/1.1 (folded lines, a
line that ends without a carriage return, a space before a colon, a length that is no number).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus

from edge.http.connection.client_connection import request_id
from edge.http.error_forms import ErrorForm
from edge.http.errors import BadHead, HttpError, UnsupportedCoding, UnsupportedVersion
from edge.http.headers import REQUEST_ID

_ONCE = (b"host", b"content-length", b"transfer-encoding", b"authorization", b"x-api-key")
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")
"""Matches a name or an address, with or without a port; empty where the target names none."""
_CHUNKED = b"chunked"


class StopParsing(Exception):
    """Ends what a parser does. It is no answer: what was raised holds all frames up to here, and a
    connection that kept it would hold itself."""


def refusal(
    error: HttpError, path: str, asked: Mapping[str, str], more: Mapping[str, str]
) -> bytes:
    """Returns a whole answer, behind which the connection ends. `asked` are the headers of the
    request, as far as they are here; `more` are further ones of the answer."""
    body = ErrorForm.of_path(path).body(error)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        REQUEST_ID: request_id(asked),
        "connection": "close",
        **error.headers(),
        **more,
    }
    head = f"HTTP/1.1 {int(error.status)} {HTTPStatus(error.status).phrase}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
    return head.encode("latin-1") + body


def fault_of(headers: Sequence[tuple[bytes, bytes]], version: str) -> HttpError | None:
    """Returns why nothing may act on a head with these headers, names in lower case, of HTTP's
    `version`. Returns None for one that is well."""
    if version not in ("1.0", "1.1"):
        return UnsupportedVersion(f"HTTP/{version} is not spoken here; HTTP/1.1 is")
    names = [name for name, _ in headers]
    for name in _ONCE:
        if names.count(name) > 1:
            return BadHead(f"the header {name.decode()} is given more than once")
    given = dict(headers)
    host = given.get(b"host")
    if host is None and version == "1.1":
        return BadHead("a request of HTTP/1.1 needs a Host header")
    if host is not None and not _HOST.fullmatch(host):
        return BadHead("the Host header is no name or address, with or without a port")
    coding = given.get(b"transfer-encoding")
    return None if coding is None else _fault_of_coding(coding, version, b"content-length" in given)


def _fault_of_coding(coding: bytes, version: str, has_length: bool) -> HttpError | None:
    """Judges how a body is packed for its way. Only chunks tell where it ends."""
    if version == "1.0":
        return BadHead("HTTP/1.0 has no Transfer-Encoding")
    if has_length:
        return BadHead("Content-Length and Transfer-Encoding exclude each other")
    if coding.lower() == _CHUNKED:
        return None
    *others, last = (one.strip(b" ") for one in coding.lower().split(b","))
    if last != _CHUNKED or not all(others) or _CHUNKED in others:
        return BadHead("Transfer-Encoding has to end with chunked, and to have it once")
    return UnsupportedCoding("no Transfer-Encoding but chunked is taken")
