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
        """The event is set whenever an attempt of the transfer is exported, which may be another
        one than this pull's."""
        early = asyncio.Event()
        self._waiting.setdefault(transfer_id, set()).add(early)
        try:
            yield early
        finally:
            others = self._waiting[transfer_id]
            others.discard(early)
            if not others:
                del self._waiting[transfer_id]

    def exported(self, transfer_id: str) -> None:
        for early in self._waiting.get(transfer_id, ()):
            early.set()
