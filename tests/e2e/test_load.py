"""Two tiers under memory pressure."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

REMOTE = ["--local-prefill-threshold", "0"]


def body(i: int) -> dict[str, Any]:
    rng = random.Random(i)
    return {
        "prompt": [rng.randrange(10, 400) for _ in range(rng.choice([3, 16, 33, 120, 300]))],
        "max_tokens": rng.choice([1, 2, 8, 30]),
        "temperature": rng.choice([0.0, 0.8]),
        "seed": i,
        "ignore_eos": True,
    }


@pytest.mark.e2e
async def test_small_pools_preempt_and_queue_but_finish_everything(
    start_cluster: Any, complete: Any
) -> None:
    """Both tiers have little more than one long request needs."""
    tiny = ["--num-blocks", "40", "--block-size", "16", "--max-model-len", "512"]
    cluster = await start_cluster(prefill_args=tiny, decode_args=[*tiny, *REMOTE])
    results = await asyncio.gather(*(complete(cluster.url, **body(i)) for i in range(60)))
    assert [r.error for r in results] == [None] * 60
    assert [r.usage["completion_tokens"] for r in results] == [
        body(i)["max_tokens"] for i in range(60)
    ]
    await cluster.wait_empty()
