"""Every HTTP request passes here: authentication, the count of open requests, and a net for errors.

Every path is for those who may (`decode_node.http.callers`), but for the few that probes and
scrapers ask. The path of the request decides, never a header. The connection has judged before,
where it is a guarded one (`edge.http.connection.guarded_protocol`).

What is posted is open from its head to the end of its answer: a node that stops waits for it also
while its body comes, its images are fetched or its grammar is checked.
"""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decode_node.http.callers import CallerCheck
from edge.http.connection.client_connection import ClientDisconnected, head_of
from edge.http.connection.guarded_protocol import CALLER
from edge.http.errors import HttpError, bug, send_error
from engine.node.open_requests import OpenRequests

logger = logging.getLogger(__name__)


class EdgeMiddleware:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp, callers: CallerCheck, open_requests: OpenRequests) -> None:
        self._app = app
        self._callers = callers
        self._open = open_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "POST":
            with self._open.entered():
                await self._serve(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        name = state["request_id"]
        has_begun = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            if CALLER not in state:
                state[CALLER] = self._callers.admit(head_of(scope))
            await self._app(scope, receive, send_noted)
        except ClientDisconnected:
            return
        except HttpError as error:
            await send_error(send_noted, error)
        except TimeoutError:
            logger.info("request %s: the client stopped reading; disconnected", name)
        except Exception:
            logger.exception("request %s failed", name)
            if not has_begun:
                await send_error(send_noted, bug())
