"""Pulls that came before the export of their transfer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class EarlyPulls:
    """Keeps pulls by transfer id; as many as wait now."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def waiting(self, transfer_id: str) -> Iterator[asyncio.Event]:
        """The event is set when the transfer is exported."""
        early = asyncio.Event()
        self._waiting.setdefault(transfer_id, set()).add(early)
        try:
            yield early
        finally:
            others = self._waiting.get(transfer_id, set())
            others.discard(early)
            if not others:
                self._waiting.pop(transfer_id, None)

    def exported(self, transfer_id: str) -> None:
        for early in self._waiting.pop(transfer_id, ()):
            early.set()
