"""Asks clients to connect anew, where their connection has no future.

An answer that begins before its request has arrived says so, because the rest of the request will
never be read. And while a service drains every answer does: the next connection then goes to
another one, and none is cut when this one ends.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ClosingConnections:
    """Wraps an ASGI application."""

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self._app = app
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_whole = not _announces_body(scope)

        async def receive_watched() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole |= message["type"] == "http.request" and not message.get("more_body", False)
            return message

        async def send_closing(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start and (self._is_draining() or not is_whole):
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive_watched, send_closing)


def _announces_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
