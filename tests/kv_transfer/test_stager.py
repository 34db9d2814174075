"""Staging of exports whose puller has not come."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from unittest.mock import create_autospec

import pytest
from kv_caches import RankCache, layout

from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.staging import StagingPool
from kv_transfer.transports.base import ExportOwner
from kv_transfer.transports.stream.chunk_messages import ChunkMessages
from kv_transfer.transports.stream.stager import Stager
from kv_transfer.transports.stream.zero_copy_sends import ZeroCopySends

SHAPE = layout()


async def test_the_look_at_what_nobody_pulled_comes_when_it_may_be_staged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the process stands still in between: there is no other look."""
    cache = RankCache(SHAPE, 0, 4)
    view = KVCacheView(cache.handle, SHAPE)
    stager = Stager(
        set(),
        view,
        StagingPool(0, 1),
        ChunkMessages(SHAPE, 0, 2048),
        create_autospec(ZeroCopySends, instance=True),
        create_autospec(ExportOwner, instance=True),
    )
    loop, clock, looks = asyncio.get_running_loop(), time.monotonic, []
    call_later = loop.call_later

    def noted(*args: Any) -> asyncio.TimerHandle:
        looks.append(call_later(*args))
        return looks[-1]

    now = [clock()]

    def slow_clock() -> float:
        now[0] += 0.02
        return now[0]

    with monkeypatch.context() as patch:
        patch.setattr(loop, "call_later", noted)
        patch.setattr(time, "monotonic", slow_clock)
        may_stage_at = stager.wait_for_puller()
    (look,) = looks
    assert look.when() >= may_stage_at
    look.cancel()
    view.close()
    cache.close()
