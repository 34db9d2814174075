"""Decides who may use a decode node's API.

router        shows its certificate, the cluster token, or both, as settings demand
API client    shows an API key, where there are any; what only routers send is ignored
anyone         where neither is asked for: on loopback, or by --allow-plaintext
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from enum import Enum

from decode_node.errors import PermissionDenied
from edge.http.errors import Unauthorized
from edge.http.request_head import READY_PATHS, RequestHead
from edge.security.config import Role
from edge.security.credentials import CallerRefused, Credentials

_ROUTERS = frozenset({Role.ROUTER})
_OPEN_PATHS = frozenset({"/health", *READY_PATHS, "/ping", "/metrics"})
"""Paths that are open to all, for probes and scrapers."""


class Caller(Enum):
    """Kinds of callers. `TRUSTED` is a router, or counts as one."""

    TRUSTED = "trusted"
    API_CLIENT = "api client"


class CallerKeys:
    """Holds the keys that clients may use; without any, all may. Only digests are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys if key]

    def __len__(self) -> int:
        return len(self._digests)

    def check(self, head: RequestHead) -> None:
        """Raises `Unauthorized` for an unknown key. Takes the same time for every wrong key."""
        if not self._digests:
            return
        given = [_digest(key) for key in head.shown_keys()]
        matches = [hmac.compare_digest(one, digest) for one in given for digest in self._digests]
        if not any(matches):
            raise Unauthorized.of(
                head,
                "the API key is missing or wrong; send `Authorization: Bearer YOUR_KEY`, or "
                "`x-api-key: YOUR_KEY`",
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class CallerCheck:
    """Judges every request by its head, as a `HeadCheck`."""

    def __init__(self, keys: CallerKeys, credentials: Credentials) -> None:
        self._keys = keys
        self._credentials = credentials

    @property
    def has_keys(self) -> bool:
        """Returns whether callers may come without a certificate."""
        return len(self._keys) > 0

    @property
    def asks_for_key(self) -> bool:
        """Returns whether callers have to show a key, a certificate or the token."""
        return self.has_keys or self._credentials.config.is_secured

    def admit(self, head: RequestHead) -> Caller | None:
        """Returns who is calling; None on a path that is open to all. Raises `HttpError`."""
        return None if head.path in _OPEN_PATHS else self._judge(head)

    def _judge(self, head: RequestHead) -> Caller:
        headers, is_plaintext = head.headers, head.is_plaintext
        if self._credentials.asks_nothing_of(headers, is_plaintext=is_plaintext):
            self._keys.check(head)
            return Caller.TRUSTED
        try:
            self._credentials.check_caller(_ROUTERS, head.names, headers, is_plaintext=is_plaintext)
            return Caller.TRUSTED
        except CallerRefused as refusal:
            if self.has_keys:
                self._keys.check(head)
                return Caller.API_CLIENT
            kind = PermissionDenied if refusal.is_known else Unauthorized
            raise kind(str(refusal)) from None
