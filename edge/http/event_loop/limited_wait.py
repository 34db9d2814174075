"""A time limit that costs nothing unless there is something to wait for.

`asyncio.timeout` makes a timer and drops it, a tenth of the time that a node takes to send a token,
and nearly every send is over at once: the socket has room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from types import coroutine
from typing import Any


async def within(seconds: float, work: Awaitable[None]) -> None:
    """Awaits `work`. Raises TimeoutError when it waits for longer than `seconds` all together."""
    steps = work.__await__()
    try:
        waits_for = next(steps)
    except StopIteration:
        return
    async with asyncio.timeout(seconds):
        await rest_of(steps, waits_for)


@coroutine
def rest_of(steps: Generator[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Goes on with `steps`, which have begun and wait for something."""
    try:
        while True:
            try:
                came = yield waits_for
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:
                waits_for = steps.throw(error)
            else:
                waits_for = steps.send(came)
    except StopIteration:
        return
