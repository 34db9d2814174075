"""Coroutines that belong together: none of them is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

Part = Coroutine[None, None, None]


async def all_or_none(parts: list[Part], guard: Part | None = None) -> None:
    """Runs all. The first error cancels the rest; returns or raises when all have ended, however
    often it is cancelled meanwhile.

    `guard` runs beside them. It never returns, but may raise.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    guards = [asyncio.create_task(guard)] if guard is not None else []
    all_of_them = asyncio.gather(*tasks)
    either: list[asyncio.Future[Any]] = [all_of_them, *guards]
    try:
        done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            ended.result()
    finally:
        for task in (*tasks, *guards):
            task.cancel()
        await _until_ended(asyncio.gather(all_of_them, *tasks, *guards, return_exceptions=True))


async def _until_ended(ended: asyncio.Future[list[Any]]) -> None:
    """Does not hand on what cancels it: a part that stops may be waiting for a thread."""
    is_cancelled = False
    while not ended.done():
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError
