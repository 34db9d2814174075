"""Waits that must come to their end before the task may: a thread writes into its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def outlast_cancels(
    is_over: Callable[[], bool], wait: Callable[[], Awaitable[object]]
) -> None:
    """Awaits `wait()` until `is_over()`, however often the task is cancelled meanwhile, and hands
    that on only then. What is waited for must end without the task's help."""
    is_cancelled = False
    while not is_over():
        try:
            await wait()
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError
