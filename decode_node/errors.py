"""Adds a decode node's own errors to those that every HTTP service has (`edge.http.errors`).

    HttpError
    ├── BadRequest
    │   ├── CacheInUse          400  a flush while requests run, as SGLang answers it
    │   └── CannotFollow        400  the engine found no way to do what the request asks
    ├── PermissionDenied        403  of one that may not
    ├── Overloaded              429  the queue is full; Retry-After
    ├── GenerationFailed        500  the answer could not be computed
    └── Unavailable             503  stopping, or the engine is dead; Retry-After

Before the first byte of an answer it is the HTTP status and the body of the OpenAI API; after
it, an `error` event that ends the stream without `[DONE]`.
"""

from __future__ import annotations

from http import HTTPStatus

from edge.http.errors import BadRequest, HttpError


class CannotFollow(BadRequest):
    """The request itself is why its answer ends here; any node would say the same."""

    default_code = "cannot_follow"


class CacheInUse(BadRequest):
    """A client of SGLang asks again after a 400."""

    default_code = "cache_in_use"


class PermissionDenied(HttpError):
    status = HTTPStatus.FORBIDDEN
    type = "permission_error"
    default_code = "permission_denied"


class Overloaded(HttpError):
    status = HTTPStatus.TOO_MANY_REQUESTS
    type = "rate_limit_error"
    default_code = "overloaded"
    default_retry_after_s = 1


class GenerationFailed(HttpError):
    default_code = "generation_failed"


class Unavailable(HttpError):
    """This node cannot serve the request now; another one could."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "service_unavailable"
    default_code = "unavailable"
    default_retry_after_s = 2
