"""Everything that can go wrong in the router, and how a client hears of it.

    RouterError                     answered to the client with an OpenAI error body
      BadRequest            400     the body cannot be read
      BadHead               400     the request line or headers cannot be trusted
      Unauthorized          401     API key missing or unknown
      ModelNotFound         404     no node serves the model
      RequestTimeout        408     the client was too slow to send its body
      BodyTooLarge          413
      UnsupportedEncoding   415     compressed bodies are not taken
      RateLimited           429     the tenant has used up what it may use
      HeadTooLarge          431     request line and headers
      Overloaded            503     too many requests in flight
      NoNodeAvailable       503     nobody to serve it now
    NodeUnreachable                 no connection to a node: nothing was sent
    NodeLost                        the connection to a node broke
    ConfigurationError              the router cannot start

The first group is the client's to read; the others never leave the router.
"""

from __future__ import annotations

import json

from starlette.types import Send


class RouterError(Exception):
    """An answer that the router gives itself."""

    status = 500
    error_type = "server_error"
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        return error_body(self.message, self.error_type, self.code, self.param)


class BadRequest(RouterError):
    status = 400
    error_type = "invalid_request_error"
    code = "invalid_json"


class BadHead(RouterError):
    status = 400
    error_type = "invalid_request_error"
    code = "invalid_http"


class HeadTooLarge(RouterError):
    status = 431
    error_type = "invalid_request_error"
    code = "headers_too_large"


class Unauthorized(RouterError):
    status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class ModelNotFound(RouterError):
    status = 404
    error_type = "invalid_request_error"
    code = "model_not_found"
    param = "model"


class RequestTimeout(RouterError):
    status = 408
    error_type = "invalid_request_error"
    code = "request_timeout"


class BodyTooLarge(RouterError):
    status = 413
    error_type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedEncoding(RouterError):
    status = 415
    error_type = "invalid_request_error"
    code = "unsupported_content_encoding"


class RateLimited(RouterError):
    status = 429
    error_type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after_s = 1


class Overloaded(RouterError):
    status = 503
    error_type = "service_unavailable"
    code = "overloaded"
    retry_after_s = 1


class NoNodeAvailable(RouterError):
    status = 503
    error_type = "service_unavailable"
    code = "no_node_available"
    retry_after_s = 2


class NodeUnreachable(Exception):
    """No connection to a node could be made, so nothing was sent to it."""


class NodeLost(Exception):
    """The connection to a node broke while an answer was awaited or read."""


class ConfigurationError(Exception):
    """A setting cannot be used. The message names it and says what to write."""


def error_body(message: str, error_type: str, code: str | None, param: str | None = None) -> bytes:
    """The error object of the OpenAI API."""
    error = {"message": message, "type": error_type, "param": param, "code": code}
    return json.dumps({"error": error}).encode()


async def send_error(send: Send, error: RouterError, request_id: str) -> None:
    """Answers with `error` as a complete ASGI response."""
    body = error.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
    ]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
