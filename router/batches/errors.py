"""Names what can be wrong with a call about files and batches.

HttpError
  NotThere             404     no such file or batch of this tenant
  InUse                409     a batch that has not ended reads the file
  TooMany              429     the tenant has as many batches, or as many bytes of files, as it may

A batch that its client has cancelled, or that another router took, ends its run by `Lost`. What is
wrong with a line of a batch is a `LineFault`.
"""

from __future__ import annotations

from http import HTTPStatus

from edge.http.errors import HttpError, NotFound


class NotThere(NotFound):
    """Is the same for what never was, what has expired, and what belongs to another."""


class InUse(HttpError):
    status = HTTPStatus.CONFLICT
    type = "invalid_request_error"
    default_code = "file_in_use"


class TooMany(HttpError):
    status = HTTPStatus.TOO_MANY_REQUESTS
    type = "insufficient_quota"
    default_code = "insufficient_quota"


class Lost(Exception):
    """The batch is not this router's any more."""


class LineFault(Exception):
    """Says what is wrong with a line, as a batch's errors do. `param` names the field."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
