"""Identifies the caller. Every path needs a key, if there are any, except those that tell whether
the router lives.

1. read       keys of the settings, and those of the file. A file that cannot be used stops the
              start: no router is open by accident
2. `admit`    digests are compared, all of them, so that the time tells nothing
3. `watch`    the file has changed: read again. If it cannot be used, the keys stay as they are
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Collection, Iterable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from edge.file_version import version_if_there
from edge.http.connection.client_connection import head_of
from edge.http.connection.guarded_protocol import CALLER
from edge.http.errors import HttpError, Unauthorized, send_error
from edge.http.request_head import RequestHead
from router.edge.key_file import Key, digest_of, read_keys
from router.errors import ConfigurationError
from router.request.tenants import ANYONE, Tenant

logger = logging.getLogger(__name__)

_CHECK_S = 1.0


class ApiKeys:
    """Knows the valid keys. `text` holds comma-separated ones without names."""

    def __init__(self, text: str = "", file: Path | None = None) -> None:
        """Reads the keys; raises `ConfigurationError` if the file is wrong."""
        given = [key.strip() for key in text.split(",")]
        self._fixed = [Key(digest_of(key), ANYONE) for key in given if key]
        self._file = file
        self._version = version_if_there(self._file)
        self._from_file = self._read_file()

    @property
    def tenants(self) -> set[Tenant]:
        return {key.tenant for key in (*self._fixed, *self._from_file)}

    @property
    def asks(self) -> bool:
        """Returns whether anything has to show a key."""
        return bool(self._fixed) or self._file is not None

    def may_change_nodes(self) -> bool:
        """Returns whether callers of the API may act as operators: where nothing shows a key."""
        return not self.asks

    def may_name_nodes(self, tenant: Tenant) -> bool:
        """Returns whether a tenant's requests may name the node that serves them."""
        return tenant.is_operator or self.may_change_nodes()

    def admit(self, shown: Iterable[str]) -> Tenant | None:
        """Returns whose key is among those that are shown, or None. Without any keys all
        may pass."""
        if not self.asks:
            return ANYONE
        found = [
            key.tenant
            for given in map(digest_of, shown)
            for key in (*self._fixed, *self._from_file)
            if hmac.compare_digest(given, key.digest)
        ]
        return found[0] if found else None

    def reload(self) -> bool:
        """Reads the file again if it has changed. Returns whether there are new keys."""
        version = version_if_there(self._file)
        if version == self._version:
            return False
        self._version = version
        try:
            self._from_file = self._read_file()
        except ConfigurationError as error:
            logger.error("%s; the keys stay as they were", error)
            return False
        logger.info("the API key file has changed: %d keys", len(self._from_file))
        return True

    async def watch(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_S)
            self.reload()

    def _read_file(self) -> list[Key]:
        if self._file is None:
            return []
        try:
            return read_keys(self._file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the API key file cannot be read: {error}") from None


class ApiKeyCheck:
    """Judges requests by their heads, as a `HeadCheck`."""

    def __init__(self, keys: ApiKeys, open_paths: Collection[str]) -> None:
        self._keys = keys
        self._open_paths = open_paths

    @property
    def asks_for_key(self) -> bool:
        return self._keys.asks

    def admit(self, head: RequestHead) -> Tenant | None:
        """Returns whose key was shown; None on a path that needs none. Raises `Unauthorized`."""
        tenant = self._keys.admit(head.shown_keys())
        if tenant is None and head.path not in self._open_paths:
            raise Unauthorized.of(
                head, "a valid API key is needed: 'Authorization: Bearer KEY', or 'x-api-key: KEY'"
            )
        return tenant


class ApiKeyGate:
    """Answers 401 for requests without a key that reach the application (ASGI). Leaves the tenant
    at `scope["state"]["tenant"]`. The connection has judged before, where it is a guarded one."""

    def __init__(self, app: ASGIApp, check: ApiKeyCheck) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            state = scope.setdefault("state", {})
            try:
                tenant = state.get(CALLER) or self._check.admit(head_of(scope))
            except HttpError as error:
                await send_error(send, error)
                return
            state["tenant"] = tenant or ANYONE
        await self._app(scope, receive, send)
