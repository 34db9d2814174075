"""Coroutines that belong together: none of them is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


async def all_or_none(parts: list[Coroutine[None, None, None]]) -> None:
    """Runs all. The first error cancels the rest; returns or raises when all have ended."""
    if parts:
        await _run_until([asyncio.create_task(part) for part in parts], asyncio.FIRST_EXCEPTION)


async def first_of(*parts: Coroutine[None, None, None]) -> None:
    """Runs all. The first that ends cancels the rest; returns or raises when all have ended."""
    await _run_until([asyncio.create_task(part) for part in parts], asyncio.FIRST_COMPLETED)


async def _run_until(tasks: list[asyncio.Task[None]], when: str) -> None:
    try:
        done, _ = await asyncio.wait(tasks, return_when=when)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
