"""The answer to a request that no application gets, as what goes over the wire."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from edge.http.connection.client_connection import request_id
from edge.http.error_forms import ErrorForm
from edge.http.errors import HttpError
from edge.http.headers import REQUEST_ID


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
