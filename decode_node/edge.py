"""What every HTTP request passes first: a request id, the API key, a net for what was missed.

Every path needs a key, when keys are set, but for the few that probes and scrapers ask. The path
of the ASGI scope decides, never a header.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decode_node.client_connection import ClientDisconnected, request_headers, request_id
from decode_node.errors import ApiError, Unauthorized
from decode_node.sse import send_error

logger = logging.getLogger(__name__)

_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})


class ApiKeys:
    """Keys that clients may use; none: everybody may. Only digests are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys if key]

    def check(self, authorization: str) -> None:
        """Raises `Unauthorized`. Takes the same time for every wrong key."""
        if not self._digests:
            return
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise Unauthorized(
                "the API key is missing or wrong; send `Authorization: Bearer YOUR_KEY`"
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class EdgeMiddleware:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp, api_keys: ApiKeys) -> None:
        self._app = app
        self._api_keys = api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = request_headers(scope)
        name = request_id(headers)
        scope.setdefault("state", {})["request_id"] = name
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        try:
            if scope["path"] not in _OPEN_PATHS:
                self._api_keys.check(headers.get("authorization", ""))
            await self._app(scope, receive, send_with_id)
        except ClientDisconnected:
            return
        except ApiError as error:
            await send_error(send_with_id, error)
        except TimeoutError:
            logger.info("request %s: the client stopped reading; disconnected", name)
        except Exception:
            logger.exception("request %s failed", name)
            if not has_begun:
                await send_error(send_with_id, ApiError("the server failed; see its log"))
