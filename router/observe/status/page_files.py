"""Holds the files of the status page, which are part of the package, as they are served.

No file loads anything from elsewhere, and the policy that goes with each lets none of it: scripts
and styles from here alone, none in the page itself, and no text that a script takes for HTML.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

PAGE = "page.html"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """Is one file, with the headers that it is served with."""

    content: bytes
    headers: Mapping[str, str]

    @property
    def tag(self) -> str:
        """Returns the entity tag: browsers ask whether they have the newest."""
        return self.headers["etag"]


def page_files() -> dict[str, PageFile]:
    """Returns the files by name."""
    folder = resources.files("router.observe.status") / "page"
    found = {}
    for file in folder.iterdir():
        kind = next((kind for end, kind in _KINDS.items() if file.name.endswith(end)), None)
        if kind is not None:
            content = file.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            found[file.name] = PageFile(content, {**_HEADERS, "content-type": kind, "etag": tag})
    return found
