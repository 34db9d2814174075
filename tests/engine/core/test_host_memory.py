"""Real engines whose KV cache is too small for what they are asked twice: the rest comes from host
memory, and every token is as it would be without."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engine.frontend.async_llm import AsyncLLM
from tests.engine.core.pd_pair import Pair, start_engine, start_engines, tokens_of
from tests.engine.core.tiny_engine import Oracle, make_request, tiny_config, until

SEEDS = range(5, 29)
NUM_BLOCKS = 40
HOST_BYTES = 400 * tiny_config().kv_layout.block_bytes


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    starting = (
        start_engine(role, NUM_BLOCKS, host_tier_bytes=HOST_BYTES, num_processes=2)
        for role in ("prefill", "decode")
    )
    made = Pair(*await start_engines(*starting))
    yield made
    for llm in (made.prefill, made.decode):
        assert not llm.is_dead, llm.dead_reason
        await until(lambda: llm.stats.num_free_blocks == NUM_BLOCKS, "free blocks")  # noqa: B023
        assert llm.stats.kv_transfer["live_transfers"] == 0
        await llm.shutdown()


async def ask_all(pair: Pair, oracle: Oracle) -> None:
    async def one(seed: int) -> None:
        export, pull = pair.request(seed)
        stream = pair.decode.generate(pull)
        prefill = asyncio.create_task(pair.run_prefill(export))
        tokens = tokens_of(stream)
        result = await pair.decode.wait_kv_result(pull.request_id)
        if not result.ok:
            pair.decode.prefill_locally(pull.request_id)
        assert await tokens == oracle.tokens(seed), seed
        await prefill

    for first in range(SEEDS.start, SEEDS.stop, 4):
        await asyncio.gather(*(one(seed) for seed in range(first, first + 4)))
        # What is stored later than the cache forgets it is not stored at all.
        await until(lambda: pair.prefill.stats.kv_transfer["live_transfers"] == 0, "stored")


@pytest.mark.asyncio
async def test_tokens_are_the_same_when_kv_comes_from_host_memory(
    pair: Pair, oracle: Oracle
) -> None:
    await ask_all(pair, oracle)
    assert pair.prefill.stats.prompt_tokens_loaded == 0
    await ask_all(pair, oracle)
    loaded = pair.prefill.stats.prompt_tokens_loaded
    assert loaded > sum(len(range(seed * 5 % 40)) for seed in SEEDS) / 6
    assert pair.prefill.stats.kv_transfer["host_tier_loaded_blocks"] > 0

    os.kill(pair.prefill.ready.transfer_pids[0], signal.SIGKILL)
    await ask_all(pair, oracle)
    await ask_all(pair, oracle)
    await until(lambda: pair.prefill.stats.prompt_tokens_loaded > loaded, "loads after the death")


@pytest.mark.asyncio
async def test_a_killed_worker_does_not_take_the_tiers_along(
    oracle: Oracle, tmp_path: Path
) -> None:
    """Another engine, of the same folders, finds what the dead one has stored. Each prompt is
    alone, so it computes while its layers come."""
    tiers = {
        "host_tier_bytes": 12 * tiny_config().kv_layout.block_bytes,
        "host_tier_path": str(tmp_path / "memory"),
        "disk_tier_bytes": HOST_BYTES,
        "disk_tier_path": str(tmp_path / "disk"),
        "num_processes": 2,
    }

    async def ask_all_of(llm: AsyncLLM) -> None:
        for seed in range(5, 13):
            request = make_request(f"r{seed}-{llm.core_pid}", seed)
            assert await tokens_of(llm.generate(request)) == oracle.tokens(seed), seed
        await until(lambda: llm.stats.kv_transfer["live_transfers"] == 0, "stored")

    first = await start_engine("prefill", NUM_BLOCKS, **tiers)
    await ask_all_of(first)
    await until(lambda: first.stats.kv_transfer["disk_tier_blocks"] > 0, "blocks on disk")
    os.kill(first.ready.worker_pids[0], signal.SIGKILL)
    await asyncio.wait_for(first.wait_dead(), 30)
    await first.shutdown()

    second = await start_engine("prefill", NUM_BLOCKS, **tiers)
    assert second.stats.prompt_tokens_loaded == 0
    await ask_all_of(second)
    assert second.stats.prompt_tokens_loaded > 0
    assert second.stats.prompt_tokens_from_disk > 0
    await second.shutdown()
