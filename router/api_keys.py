"""Bearer keys. Every path needs one, except those that tell whether the router lives."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from router.client_connection import request_headers, request_id
from router.errors import Unauthorized, send_error

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})


class ApiKeys:
    """Keys are kept as digests. With none, everybody may pass."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def from_text(cls, text: str) -> ApiKeys:
        """From a comma-separated list."""
        return cls(key.strip() for key in text.split(",") if key.strip())

    def admit(self, authorization: str) -> bool:
        """Whether the header holds one of the keys. Takes equally long for any wrong one."""
        if not self._digests:
            return True
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


class ApiKeyGate:
    """ASGI: answers 401 for requests without a key, before anything else looks at them."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = request_headers(scope)
            if not self._keys.admit(headers.get("authorization", "")):
                error = Unauthorized("A valid API key is needed: 'Authorization: Bearer KEY'.")
                await send_error(send, error, request_id(headers))
                return
        await self._app(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
