"""Reads the secret that services of one cluster show each other.

The file has one secret a line: the first is shown, each is accepted. To renew it without a gap,
add the new one as the second line everywhere, then swap the lines, then drop the old one.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from edge.security.config import SecurityError
from edge.security.watched_files import WatchedFiles

TOKEN_HEADER = "x-tandem-cluster-token"
MIN_LENGTH = 16


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Holds `digests` of all that are accepted."""

    shown: str
    digests: list[bytes]


class ClusterToken:
    """Knows the tokens of a file. Raises `SecurityError` if the file has none."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._files = WatchedFiles([path], self._load)

    def shown(self) -> str:
        return self._files.get().shown

    def accepts(self, given: str) -> bool:
        """Returns whether it is one of them, in the same time for every wrong one."""
        digest = _digest(given)
        matches = [hmac.compare_digest(digest, one) for one in self._files.get().digests]
        return any(matches)

    def _load(self) -> _Tokens:
        lines = Path(self._path).read_text(encoding="ascii", errors="replace").splitlines()
        tokens = [line.strip() for line in lines if line.strip()]
        for token in tokens:
            if len(token) < MIN_LENGTH or not (token.isascii() and token.isprintable()):
                raise SecurityError(
                    f"{self._path}: a cluster token has at least {MIN_LENGTH} printable ASCII "
                    f"characters; make one by: openssl rand -hex 32"
                )
        if not tokens:
            raise SecurityError(f"{self._path} has no cluster token")
        return _Tokens(tokens[0], [_digest(token) for token in tokens])


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
