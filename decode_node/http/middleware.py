"""Every HTTP request passes here first: a request id, who asks, a net for what was missed.

Every path is for those who may (`decode_node.http.callers`), but for the few that probes and
scrapers
ask. The path of the request decides, never a header. The connection has judged before, where it is
a guarded one (`edge.http.guarded_protocol`).
"""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decode_node.http.callers import CallerCheck
from edge.http import headers as names
from edge.http.client_connection import ClientDisconnected, request_headers, request_id
from edge.http.errors import HttpError, send_error
from edge.http.guarded_protocol import CALLER

logger = logging.getLogger(__name__)

_REQUEST_ID = names.REQUEST_ID.encode()


class EdgeMiddleware:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp, callers: CallerCheck) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = request_headers(scope)
        name = request_id(headers)
        state = scope.setdefault("state", {})
        state["request_id"] = name
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message["headers"] = [
                    *message["headers"],
                    (_REQUEST_ID, name.encode()),
                ]
            await send(message)

        try:
            if CALLER not in state:
                state[CALLER] = self._callers.admit(scope["path"], headers)
            await self._app(scope, receive, send_with_id)
        except ClientDisconnected:
            return
        except HttpError as error:
            await send_error(send_with_id, error)
        except TimeoutError:
            logger.info("request %s: the client stopped reading; disconnected", name)
        except Exception:
            logger.exception("request %s failed", name)
            if not has_begun:
                await send_error(send_with_id, HttpError("the server failed; see its log"))
