"""Residency of KV blocks: what is counted when, and how many blocks are watched."""

from __future__ import annotations

import random

import pytest

from engine.contracts.outputs import RESIDENCY_BUCKETS, BlockTimes
from engine.kv_cache import sampled_pool
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.sampled_pool import SampledBlockPool
from kv_transfer.layout import attention_group


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sampled_pool, "time", clock)
    return clock


def total(times: BlockTimes) -> tuple[int, float]:
    return sum(times.counts), times.total_s


def test_a_block_that_is_found_again_and_then_evicted(clock: Clock) -> None:
    pool = SampledBlockPool(1, enable_caching=True, sample=1.0)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks([block], [b"a"])
    clock.now += 5
    pool.free_blocks([block])
    clock.now += 2
    pool.touch([block])
    clock.now += 10
    pool.free_blocks(iter([block]))
    clock.now += 0.75
    pool.get_new_blocks(1)
    assert total(pool.stats.reuse_gap) == (1, 2.0)
    assert total(pool.stats.lifetime) == (1, 17.75)
    assert total(pool.stats.idle_before_evict) == (1, 0.75)
    assert pool.stats.lifetime.counts[RESIDENCY_BUCKETS.index(20.0)] == 1
    assert pool.stats.idle_before_evict.counts[RESIDENCY_BUCKETS.index(1.0)] == 1
    assert pool.get_cached_block(b"a") is None


def test_what_was_never_cached_or_was_forgotten_is_not_evicted(clock: Clock) -> None:
    pool = SampledBlockPool(2, enable_caching=True, sample=1.0)
    first, second = pool.get_new_blocks(2)
    pool.cache_full_blocks([second], [b"b"])
    pool.free_blocks([first, second])
    assert pool.reset_prefix_cache()
    clock.now += 3
    pool.free_blocks(pool.get_new_blocks(2))
    pool.get_new_blocks(2)
    assert total(pool.stats.lifetime) == total(pool.stats.reuse_gap) == (0, 0.0)


@pytest.mark.parametrize("at_once", [1, 7, 100])
def test_the_sample_is_a_part_of_all_allocations(at_once: int) -> None:
    random.seed(5)
    pool = SampledBlockPool(100, enable_caching=True, sample=0.2)
    evicted = num_taken = 0
    for turn in range(3000 // at_once):
        blocks = pool.get_new_blocks(at_once)
        num_taken += at_once
        names = [f"{turn}-{place}".encode() for place in range(at_once)]
        pool.cache_full_blocks(blocks, names)
        pool.free_blocks(blocks)
    evicted = total(pool.stats.lifetime)[0]
    assert 0.17 < evicted / (num_taken - 100) < 0.23


def test_nobody_watches_unless_asked() -> None:
    group = attention_group(layers=range(2), heads=2, head_dim=8, dtype="float32", block_size=4)
    assert KVCacheManager(4, [group], True).residency() is None
    watched = KVCacheManager(4, [group], True, residency_sample=0.5).residency()
    assert watched is not None
    assert total(watched.lifetime) == (0, 0.0)
