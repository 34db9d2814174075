"""Does the work on long bodies beside the event loop, one piece after the other.

A thread of its own takes turns with the event loop every few milliseconds. Many threads would take
turns with each other first: so there is one, and long bodies wait for each other, and for none
else does anything take longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LONG_BODY = 16 << 10
"""Bytes. Work on what is shorter is over sooner than a thread begins."""

_Result = TypeVar("_Result")
_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-bodies")


async def run(is_long: bool, work: Callable[[], _Result]) -> _Result:
    """Returns what `work` does. Long work is done in the thread."""
    if not is_long:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_worker, work)


async def pause() -> None:
    """Lets the event loop serve all else that is there, tokens of running answers above all. What
    is done to a request in one go should be over in a few hundred microseconds."""
    await asyncio.sleep(0)
