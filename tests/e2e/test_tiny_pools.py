"""Two tiers with hardly any memory: requests wait for room on both, and all end.

`tests/engine/sched/test_two_tiers.py` has hundreds of them, at every ratio of the tiers.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

NUM_REQUESTS = 120
NUM_CLIENTS = 40
BLOCKS_OF_ONE_REQUEST = 6
"""Blocks of 16 tokens: the longest request that is allowed."""
TINY = [
    "--max-model-len", str(16 * BLOCKS_OF_ONE_REQUEST),
    "--block-size", "16",
    "--num-blocks", str(2 * BLOCKS_OF_ONE_REQUEST),
    "--max-num-seqs", "8",
    "--max-num-batched-tokens", "64",
    "--kv-lease-s", "20",
]  # fmt: skip


def wanted(number: int) -> dict[str, Any]:
    """Ten kinds of requests: half of them long prompts, half answers that grow over blocks."""
    kind = number % 10
    length = 10 + 8 * kind if kind % 2 else 5 + kind
    return {
        "prompt": [(7 * i + kind) % 400 + 10 for i in range(length)],
        "max_tokens": 3 if kind % 2 else 20,
        "temperature": 0.0 if kind < 5 else 0.9,
        "seed": kind,
        "ignore_eos": True,
    }


@pytest.mark.e2e
async def test_no_deadlock_with_pools_of_two_requests(start_cluster: Any, complete: Any) -> None:
    cluster = await start_cluster(
        prefill_args=TINY, decode_args=[*TINY, "--local-prefill-threshold", "0"]
    )
    numbers = iter(range(NUM_REQUESTS))
    texts: dict[int, set[str]] = defaultdict(set)
    paths: dict[str, int] = defaultdict(int)

    async def client() -> None:
        for number in numbers:
            request = wanted(number)
            result = await complete(cluster.url, **request)
            assert result.error is None, result.error
            assert result.usage["completion_tokens"] == request["max_tokens"]
            texts[number % 10].add(result.text)
            paths[result.timeline["path"]] += 1

    async with asyncio.timeout(90):
        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    assert all(len(found) == 1 for found in texts.values()), "the same tokens every time"
    assert paths["remote"] > NUM_REQUESTS // 2, dict(paths)
    await cluster.wait_empty()
