"""Starts work that goes on for as long as its service: watching, reporting, giving signs of life.

Nothing awaits it before the end, and asyncio tells of a failure when the task is thrown away: such
work would be gone, and the service half blind, without a word. So the log has the error at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


def start_lasting(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Returns the task of `work`, which its owner cancels. `name`: what the log calls it."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_tell_failure)
    return task


def _tell_failure(task: asyncio.Task[None]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    logger.critical(
        "%s has failed, and this process needs a restart", task.get_name(), exc_info=error
    )
