"""Says how a service looks from outside: below which path, and to pages of which other sites.

A page of another site may read our answers only if its origin is allowed (CORS). None is,
unless settings say so. What a browser may send without asking first, forms, plain text and requests
without a body, is refused where it says that another site's page made it send them; everything else
it asks for by a preflight. A body of the API must have the type of JSON
(`edge.http.connection.client_connection`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from edge.http import headers as names

ANY_ORIGIN = "*"

_ORIGIN = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?")
_METHODS = "GET, POST"
_EXPOSED = f"{names.REQUEST_ID}, retry-after, {names.PREFILL_NODE}"
_PREFLIGHT_AGE_S = "600"
_SAFE = "GET", "HEAD", "OPTIONS"
_CHANGED_BY_GET = ("/flush_cache",)
"""SGLang's clients ask so."""
_BROWSER = "mozilla/"
"""Begins the `User-Agent` of every browser, and no page can change that of an image."""
_UNASKED = "", "application/x-www-form-urlencoded", "multipart/form-data", "text/plain"
"""Types of bodies that a page may send without a preflight."""


def check_origin(origin: str) -> None:
    """Raises `ValueError` for what is no origin of a page."""
    if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
        raise ValueError(
            f"{origin!r} is not an origin: write scheme://host or scheme://host:port, without a "
            f"path, or * for every one"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpFront:
    """Holds it. `root_path` is empty or begins with a slash and ends without."""

    root_path: str = ""
    origins: Collection[str] = ()

    def inner_path(self, path: str) -> str:
        """Returns a path without `root_path`, which proxies in front of us may have left on."""
        if self.root_path and path.startswith(f"{self.root_path}/"):
            return path.removeprefix(self.root_path)
        return path

    def cors_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Returns what an answer says to the page that asked."""
        if not self.origins:
            return {}
        found = {"vary": "origin"}
        if self.allows(headers):
            found["access-control-allow-origin"] = headers["origin"]
            found["access-control-expose-headers"] = _EXPOSED
        return found

    def preflight_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Returns the answer to the question whether a page may make a request."""
        return {
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": headers.get("access-control-request-headers", "*"),
            "access-control-max-age": _PREFLIGHT_AGE_S,
        }

    def allows(self, headers: Mapping[str, str]) -> bool:
        origin = headers.get("origin", "")
        return origin in self.origins or (bool(origin) and ANY_ORIGIN in self.origins)

    def refuses(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """Returns whether a page of a site that is not allowed made a browser send this, which
        could change something, and the browser did not ask first."""
        kind = names.media_type(headers)
        may_change = method not in _SAFE or path in _CHANGED_BY_GET
        if not (may_change and kind in _UNASKED):
            return False
        if method in _SAFE and _hides_site(headers):
            return True
        return _is_of_other_site(headers) and not self.allows(headers)

    def is_preflight(self, method: str, headers: Mapping[str, str]) -> bool:
        """Returns whether a browser asks before a page's request. It shows no key."""
        asks = "origin" in headers and "access-control-request-method" in headers
        return bool(self.origins) and method == "OPTIONS" and asks


def _hides_site(headers: Mapping[str, str]) -> bool:
    """Returns whether a browser asks and cannot say for which site. Over plain HTTP it names none
    where a page has an image loaded, and the page can have it leave its own address out."""
    is_browser = headers.get("user-agent", "").lower().startswith(_BROWSER)
    return is_browser and "sec-fetch-site" not in headers and "origin" not in headers


def _is_of_other_site(headers: Mapping[str, str]) -> bool:
    """Returns whether a browser says so. Those of today say it themselves where the connection
    is trusted; a proxy in front of us may have changed the host that an origin is compared with."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
    except ValueError:
        return True
