"""Waits for what happens in another task or process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_TIMEOUT_S = 60.0


async def until(condition: Callable[[], object], what: str = "") -> None:
    """Returns once `condition` holds. Raises AssertionError naming `what` where it does not."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.002)
