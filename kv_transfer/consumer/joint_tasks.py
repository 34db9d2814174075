"""Coroutines that belong together: none of them is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from kv_transfer.transports.late_cancel import outlast_cancels

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
        # A part that stops may be waiting for a thread.
        ended = asyncio.gather(all_of_them, *tasks, *guards, return_exceptions=True)
        await outlast_cancels(ended.done, lambda: asyncio.wait([ended]))
