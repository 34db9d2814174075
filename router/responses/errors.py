"""Names what can be wrong with a request that refers to what is kept.

HttpError
  NotKept              404     no such response, conversation or item of this tenant
  PreviousNotFound     400     previous_response_id names none, or one that lost its beginning
  ConversationLocked   409     another response adds to the conversation now
  RefusedByNode        4xx     a node would not answer it
"""

from __future__ import annotations

from http import HTTPStatus

from edge.http.errors import BadRequest, ErrorDetail, HttpError, NotFound


class NotKept(NotFound):
    """Is the same for what never was, what has expired, and what belongs to another."""


class PreviousNotFound(BadRequest):
    default_code = "previous_response_not_found"
    default_param = "previous_response_id"


class ConversationLocked(HttpError):
    status = HTTPStatus.CONFLICT
    type = "invalid_request_error"
    default_code = "conversation_locked"
    default_param = "conversation"
    default_retry_after_s = 1


class RefusedByNode(HttpError):
    """Says what the node said."""

    def __init__(self, status: HTTPStatus, said: ErrorDetail) -> None:
        super().__init__(said.message, param=said.param, code=said.code)
        self.status = status
        self.type = said.type
