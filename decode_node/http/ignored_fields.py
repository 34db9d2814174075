"""Decides what becomes of what this server does not have: counted and ignored, or refused.

These are fields that nothing knows, and parts of requests that clients send to every server, such
as tools that it would run.

Each name is logged once, and only this many of them: clients choose the names.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence

from edge.http.errors import BadRequest

logger = logging.getLogger(__name__)

_MAX_NAMES = 256
"""Names that are remembered, and warned of."""
_PLAIN_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)
_MAX_LISTED = 10
_MAX_LISTED_LENGTH = 64


class IgnoredFields:
    """Takes the unknown names of each request. `count` gets the number of ignored ones."""

    def __init__(self, count: Callable[[int], None], *, refuses: bool) -> None:
        self._count = count
        self._refuses = refuses
        self._warned: set[str] = set()

    def note(self, names: Sequence[str]) -> None:
        """Counts the names and warns of new ones. Raises `BadRequest` where they are refused."""
        if not names:
            return
        if self._refuses:
            raise _unknown(sorted(names))
        self._count(len(names))
        for name in names:
            shown = name if _PLAIN_NAME.fullmatch(name) else "(not a plain name)"
            if shown not in self._warned and len(self._warned) < _MAX_NAMES:
                self._warned.add(shown)
                logger.warning("requests have %s, which is not known or not built: ignored", shown)


def _unknown(names: Sequence[str]) -> BadRequest:
    listed = ", ".join(name[:_MAX_LISTED_LENGTH] for name in names[:_MAX_LISTED])
    return BadRequest(
        f"not known or not built here, and --strict-fields refuses it: {listed}",
        param=names[0][:_MAX_LISTED_LENGTH],
        code="unknown_parameter",
    )
