"""Errors that every HTTP service of tandem may answer, and their form.

    HttpError
    ├── PathMoved               307  the same path without a slash at its end
    ├── BadRequest              400  the request is wrong; param says where
    │   └── BadHead             400  the request line or headers cannot be trusted
    ├── Unauthorized            401  no key, or an unknown one
    ├── OriginRefused           403  a page of another site asks whether it may ask
    ├── NotFound                404  no such model or path
    ├── MethodNotAllowed        405
    ├── RequestTimeout          408  the request did not arrive in time
    ├── RequestTooLarge         413
    ├── UnsupportedBody         415  no JSON, or compressed
    ├── HeadTooLarge            431  request line and headers
    ├── UnsupportedCoding       501  the body is packed for its way otherwise than in chunks
    ├── UnsupportedVersion      505  neither HTTP/1.1 nor HTTP/1.0
    └── Stopping                503  the server stops before the answer has ended; Retry-After

Services add their own. All end as the error object of the OpenAI API.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Self

import msgspec
from starlette.types import Send

from edge.http import headers as names
from edge.http.request_head import RequestHead


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The error object of the OpenAI API."""

    error: ErrorDetail


class HttpError(Exception):
    """Is an answer that is no success. `type` groups errors for people, `code` for programs;
    `param` is the wrong field; `retry_after_s` says when to come back."""

    status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR
    type = "server_error"
    default_code: str | None = None
    default_param: str | None = None
    default_retry_after_s: int | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param or self.default_param
        self.code = code or self.default_code
        self.retry_after_s = retry_after_s or self.default_retry_after_s

    def body(self) -> bytes:
        return error_body(self.message, self.type, self.code, self.param)

    def headers(self) -> dict[str, str]:
        """Returns headers beyond those of the body, names in lower case."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        return headers


def bug() -> HttpError:
    """Returns what a client gets for an error that was not expected."""
    return HttpError("the server failed; see its log", code="internal_error")


class BadRequest(HttpError):
    status = HTTPStatus.BAD_REQUEST
    type = "invalid_request_error"
    default_code = "invalid_value"


class BadHead(BadRequest):
    default_code = "invalid_http"


class Unauthorized(HttpError):
    """Has no key, or an unknown one. A page makes a browser ask for a name and a password."""

    status = HTTPStatus.UNAUTHORIZED
    type = "authentication_error"
    default_code = "invalid_api_key"
    is_page = False

    def headers(self) -> dict[str, str]:
        scheme = 'Basic realm="tandem: any name, an API key as password"'
        return {**super().headers(), "www-authenticate": scheme if self.is_page else "Bearer"}

    @classmethod
    def of(cls, head: RequestHead, message: str) -> Self:
        """Returns the answer to this request."""
        error = cls(message)
        error.is_page = head.is_page
        return error


class OriginRefused(HttpError):
    status = HTTPStatus.FORBIDDEN
    type = "permission_error"
    default_code = "origin_refused"


class PathMoved(HttpError):
    """Is somewhere else. `location` is relative: what is in front of us, scheme, host and path, is
    the client's to know."""

    status = HTTPStatus.TEMPORARY_REDIRECT
    type = "invalid_request_error"
    default_code = "path_moved"

    def __init__(self, message: str, *, location: str) -> None:
        super().__init__(message)
        self._location = location

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "location": self._location}


class NotFound(HttpError):
    status = HTTPStatus.NOT_FOUND
    type = "invalid_request_error"
    default_code = "not_found"


class MethodNotAllowed(HttpError):
    status = HTTPStatus.METHOD_NOT_ALLOWED
    type = "invalid_request_error"
    default_code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self._allowed = allowed

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "allow": self._allowed}


class NoWebSockets(HttpError):
    """Leads a client that wants a WebSocket to the same path over HTTP. Codex goes there at once
    when it gets this status, and tries again for some seconds when it gets another."""

    status = HTTPStatus.UPGRADE_REQUIRED
    type = "invalid_request_error"
    default_code = "no_websockets"

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "upgrade": "HTTP/1.1", "connection": "upgrade"}


class RequestTimeout(HttpError):
    status = HTTPStatus.REQUEST_TIMEOUT
    type = "invalid_request_error"
    default_code = "request_timeout"


class RequestTooLarge(HttpError):
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    type = "invalid_request_error"
    default_code = "request_too_large"


class UnsupportedBody(HttpError):
    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    type = "invalid_request_error"
    default_code = "unsupported_content_type"


class HeadTooLarge(HttpError):
    status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    type = "invalid_request_error"
    default_code = "headers_too_large"


class UnsupportedCoding(HttpError):
    status = HTTPStatus.NOT_IMPLEMENTED
    type = "invalid_request_error"
    default_code = "unsupported_transfer_encoding"


class UnsupportedVersion(HttpError):
    status = HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
    type = "invalid_request_error"
    default_code = "unsupported_http_version"


class Stopping(HttpError):
    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "service_unavailable"
    default_code = "draining"
    default_retry_after_s = 2


def error_body(message: str, type_: str, code: str | None, param: str | None = None) -> bytes:
    """Returns the error object of the OpenAI API as JSON."""
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, type_, param, code)))


async def send_error(
    send: Send, error: HttpError, request_id: str = "", *, body: bytes | None = None
) -> None:
    """Answers with `error` as a complete ASGI response. `body` has the form of another API."""
    body = error.body() if body is None else body
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **error.headers(),
    }
    if request_id:
        headers[names.REQUEST_ID] = request_id
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": int(error.status), "headers": raw})
    await send({"type": "http.response.body", "body": body})
