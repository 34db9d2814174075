"""Holds what is known of a request before any of its body is read, and finds the keys in it.

    Authorization: Bearer KEY      OpenAI's clients and most others
    x-api-key: KEY                 Anthropic's clients
    Authorization: Basic ...       browsers, on pages alone; any name, the key is the password

A browser sends a password again without being asked, also when another site makes it ask. So a
password opens nothing but pages, which change nothing.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

READY_PATHS = ("/ready", "/health_generate")
"""The second name is SGLang's."""
PAGES = frozenset({"/status", "/docs", "/openapi.json"})
"""Paths that people open in a browser."""
PARTS = "/status/"
"""Begins the paths of what a page is made of."""
API_KEY = "x-api-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """Holds the head of one request.

    Attributes:
        path: As it was sent, without the query.
        headers: Names in lower case; of a repeated header the first.
        names: DNS names of the certificate that was shown; None if none was.
        is_plaintext: The connection is without TLS.
    """

    method: str = "GET"
    path: str
    headers: Mapping[str, str]
    names: Collection[str] | None = None
    is_plaintext: bool = False

    def shown_keys(self) -> list[str]:
        """Returns all keys that are shown."""
        found = []
        scheme, _, value = self.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            found.append(value.strip())
        elif scheme.lower() == "basic" and self.is_page:
            found.append(_password(value.strip()))
        if API_KEY in self.headers:
            found.append(self.headers[API_KEY].strip())
        return [key for key in found if key]

    @property
    def is_page(self) -> bool:
        is_page = self.path in PAGES or self.path.startswith(PARTS)
        return is_page and self.method in ("GET", "HEAD")


class HeadCheck(Protocol):
    """Judges who may make a request, by its head alone."""

    @property
    def asks_for_key(self) -> bool: ...

    def admit(self, head: RequestHead) -> object | None:
        """Returns who is calling; None for what is open to all. Raises `HttpError`."""


def _password(encoded: str) -> str:
    try:
        pair = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return pair.partition(":")[2]
