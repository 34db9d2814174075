"""Work that goes on while what a store keeps is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def running_tasks(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs each in a task of its own, and cancels all at the end."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
