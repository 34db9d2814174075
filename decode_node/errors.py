"""What a client is told when something goes wrong.

    ApiError
    ├── BadRequest              400  the request is wrong; param says where
    ├── Unauthorized            401  no API key, or a wrong one
    ├── PermissionDenied        403  of somebody who may not
    ├── NotFound                404  no such model or path
    ├── RequestTimeout          408  the request did not arrive in time
    ├── RequestTooLarge         413
    ├── UnsupportedEncoding     415  compressed bodies are not taken
    ├── Overloaded              429  the queue is full; Retry-After
    ├── GenerationFailed        500  the answer could not be computed
    └── Unavailable             503  stopping, or the engine is dead; Retry-After

Before the first byte of an answer it is the HTTP status and the body of the OpenAI API; after
it, an `error` event that ends the stream without `[DONE]`.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from engine.frontend.input_processor import InvalidRequest


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The error object of the OpenAI API."""

    error: ErrorDetail


class ApiError(Exception):
    """`type` groups errors for people, `code` for programs; `param` is the wrong field."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    type = "server_error"
    default_code: str | None = None
    retry_after_s: int | None = None
    is_of_this_node = False
    """Another node could serve the request."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code

    def body(self) -> bytes:
        detail = ErrorDetail(self.message, self.type, self.param, self.code)
        return msgspec.json.encode(ErrorBody(detail))

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.status is HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return headers


class BadRequest(ApiError):
    status = HTTPStatus.BAD_REQUEST
    type = "invalid_request_error"
    default_code = "invalid_value"

    @classmethod
    def from_invalid(cls, error: InvalidRequest) -> BadRequest:
        return cls(error.message, param=error.param, code=error.code)


class Unauthorized(ApiError):
    status = HTTPStatus.UNAUTHORIZED
    type = "authentication_error"
    default_code = "invalid_api_key"


class PermissionDenied(ApiError):
    status = HTTPStatus.FORBIDDEN
    type = "permission_error"
    default_code = "permission_denied"


class NotFound(ApiError):
    status = HTTPStatus.NOT_FOUND
    type = "invalid_request_error"
    default_code = "not_found"


class MethodNotAllowed(ApiError):
    status = HTTPStatus.METHOD_NOT_ALLOWED
    type = "invalid_request_error"
    default_code = "method_not_allowed"


class RequestTimeout(ApiError):
    status = HTTPStatus.REQUEST_TIMEOUT
    type = "invalid_request_error"
    default_code = "request_timeout"


class RequestTooLarge(ApiError):
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    type = "invalid_request_error"
    default_code = "request_too_large"


class UnsupportedEncoding(ApiError):
    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    type = "invalid_request_error"
    default_code = "unsupported_content_encoding"


class Overloaded(ApiError):
    status = HTTPStatus.TOO_MANY_REQUESTS
    type = "rate_limit_error"
    default_code = "overloaded"
    retry_after_s = 1


class GenerationFailed(ApiError):
    default_code = "generation_failed"


class Unavailable(ApiError):
    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "service_unavailable"
    default_code = "unavailable"
    retry_after_s = 2
    is_of_this_node = True
