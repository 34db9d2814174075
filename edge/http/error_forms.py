"""Errors in the form of the API that was asked.

All code that answers an error writes the OpenAI object. On the paths of Anthropic's API the
outermost layer turns it into that API's own:

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
    {"type": "error", "error": {"type": "invalid_request_error", "message": ...}}

Anthropic's clients read `details` of an error, too: they send a conversation whole when those say
that no thread can be had.
"""

from __future__ import annotations

from enum import Enum

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge.http.errors import ErrorBody, HttpError

_MESSAGES = "/v1/messages"
_FIRST_ERROR = 400
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
THREAD_UNSUPPORTED = "thread_unsupported_request"
"""Is Anthropic's own code of a request that cannot belong to a thread of messages."""
_OTHER_CLIENT_ERROR, _OTHER_SERVER_ERROR = "invalid_request_error", "api_error"
_FIRST_SERVER_ERROR = 500
_decode = msgspec.json.Decoder(ErrorBody).decode


class AnthropicErrorFacts(msgspec.Struct):
    """Says what clients act on: `unsupported` are the fields that stand in the way."""

    error_code: str
    unsupported: list[str]


class AnthropicErrorDetail(msgspec.Struct, omit_defaults=True):
    type: str
    message: str
    details: AnthropicErrorFacts | None = None


class AnthropicErrorBody(msgspec.Struct, tag_field="type", tag="error"):
    """The error object of Anthropic's API."""

    error: AnthropicErrorDetail


class ErrorForm(Enum):
    """Names the APIs that have an error object of their own."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"

    @classmethod
    def of_path(cls, path: str) -> ErrorForm:
        """Returns the form of the API at `path`."""
        is_messages = path == _MESSAGES or path.startswith(_MESSAGES + "/")
        return cls.ANTHROPIC if is_messages else cls.OPENAI

    def body(self, error: HttpError) -> bytes:
        """Returns the JSON of an error."""
        return self.translate(error.body(), int(error.status))

    def translate(self, body: bytes, status: int) -> bytes:
        """Returns the JSON of an error that is there as an OpenAI object. What is none stays as it
        is: a decode node behind a router has translated already."""
        if self is ErrorForm.OPENAI:
            return body
        try:
            detail = _decode(body).error
        except (msgspec.DecodeError, UnicodeDecodeError):
            return body
        message = detail.message
        if detail.param and detail.param not in message:
            message = f"{detail.param}: {message}"
        kind = _OTHER_SERVER_ERROR if status >= _FIRST_SERVER_ERROR else _OTHER_CLIENT_ERROR
        facts = None
        if detail.code == THREAD_UNSUPPORTED:
            facts = AnthropicErrorFacts(detail.code, [detail.param or ""])
        found = AnthropicErrorDetail(_TYPES.get(status, kind), message, facts)
        return msgspec.json.encode(AnthropicErrorBody(found))

    def event(self, body: bytes) -> bytes:
        """Returns the event that ends a stream which breaks off. `body` is the error's JSON."""
        name = b"event: error\n" if self is ErrorForm.ANTHROPIC else b""
        return name + b"data: " + body + b"\n\n"


class ErrorForms:
    """Gives the errors of an application the form of the API that was asked (ASGI)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            form = ErrorForm.of_path(scope["path"])
            send = send if form is ErrorForm.OPENAI else _translating(send, form)
        await self._app(scope, receive, send)


def _translating(send: Send, form: ErrorForm) -> Send:
    """Returns a `send` that translates errors, whose body comes in one message."""
    held: list[Message] = []

    async def send_translated(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= _FIRST_ERROR:
            held.append(message)
            return
        if held and message["type"] == "http.response.body":
            start = held.pop()
            body = form.translate(message.get("body", b""), start["status"])
            length = (b"content-length", str(len(body)).encode())
            headers = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
            await send({**start, "headers": [*headers, length]})
            message = {**message, "body": body}
        await send(message)

    return send_translated
