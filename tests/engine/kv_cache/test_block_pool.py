"""Free queue, pool and prefix cache: by hand, and against plain models of them."""

from __future__ import annotations

import tracemalloc
from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from engine.kv_cache.block import FreeKVCacheBlockQueue, KVCacheBlock
from engine.kv_cache.block_pool import BlockHashToBlockMap, BlockPool


def name(content: int) -> bytes:
    return content.to_bytes(32, "little")


# Free queue -------------------------------------------------------------------------------------


class FreeQueueAgainstList(RuleBasedStateMachine):
    """The queue does what a list does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [KVCacheBlock(i) for i in range(8)]
        self.queue = FreeKVCacheBlockQueue(self.blocks[:4])
        self.model = [0, 1, 2, 3]

    @rule()
    def popleft(self) -> None:
        if self.model:
            assert self.queue.popleft().block_id == self.model.pop(0)
        else:
            with pytest.raises(IndexError):
                self.queue.popleft()

    @rule(index=st.integers(0, 7))
    def remove(self, index: int) -> None:
        if index in self.model:
            self.queue.remove(self.blocks[index])
            self.model.remove(index)
        else:
            with pytest.raises(ValueError, match="not in the free queue"):
                self.queue.remove(self.blocks[index])

    @rule(index=st.integers(0, 7), at_front=st.booleans())
    def insert(self, index: int, at_front: bool) -> None:
        insert = self.queue.appendleft if at_front else self.queue.append
        if index in self.model:
            with pytest.raises(ValueError, match="already"):
                insert(self.blocks[index])
        else:
            insert(self.blocks[index])
            self.model.insert(0 if at_front else len(self.model), index)

    @invariant()
    def same_order(self) -> None:
        assert self.queue.block_ids() == self.model
        assert self.queue.num_free_blocks == len(self.model)


TestFreeQueueAgainstList = FreeQueueAgainstList.TestCase
TestFreeQueueAgainstList.settings = settings(max_examples=60, stateful_step_count=30)


def test_the_free_queue_allocates_nothing() -> None:
    blocks = [KVCacheBlock(i) for i in range(300)]
    queue = FreeKVCacheBlockQueue(blocks)

    def turn_over() -> None:
        for _ in range(1000):
            queue.append(queue.popleft())
        for block in blocks[100:200]:
            queue.remove(block)
        for block in blocks[100:200]:
            queue.appendleft(block)

    turn_over()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    turn_over()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 2000


# Hash map ---------------------------------------------------------------------------------------


def test_one_block_is_stored_inline_and_duplicates_in_a_dict() -> None:
    blocks = [KVCacheBlock(i) for i in range(3)]
    cached = BlockHashToBlockMap()
    cached.insert(name(1), blocks[0])
    assert cached._blocks[name(1)] is blocks[0]
    cached.insert(name(1), blocks[1])
    cached.insert(name(1), blocks[2])
    assert cached.get_one(name(1)) is blocks[0]
    cached.remove(name(1), blocks[0])
    cached.remove(name(1), blocks[2])
    assert cached._blocks[name(1)] is blocks[1]
    with pytest.raises(KeyError):
        cached.remove(name(1), blocks[0])
    cached.remove(name(1), blocks[1])
    assert len(cached) == 0
    assert cached.get_one(name(1)) is None
    with pytest.raises(KeyError):
        cached.remove(name(1), blocks[1])


# Pool -------------------------------------------------------------------------------------------


def test_cached_content_is_forgotten_on_allocation_only() -> None:
    pool = BlockPool(2, enable_caching=True)
    first = pool.get_new_blocks(1)
    pool.cache_full_blocks(first, [name(1)])
    pool.free_blocks(first)
    assert pool.get_cached_block(name(1)) is first[0]
    # The block that holds nothing goes first.
    other = pool.get_new_blocks(1)
    assert other[0] is not first[0]
    assert pool.get_cached_block(name(1)) is first[0]
    assert pool.get_new_blocks(1) == first
    assert pool.get_cached_block(name(1)) is None


def test_least_recently_freed_goes_first() -> None:
    pool = BlockPool(3, enable_caching=True)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(blocks, [name(i) for i in range(3)])
    pool.free_blocks([blocks[1], blocks[2], blocks[0]])
    pool.touch([blocks[1]])
    pool.free_blocks([blocks[1]])
    assert pool.get_new_blocks(3) == [blocks[2], blocks[0], blocks[1]]


def test_more_than_free_and_double_free_are_refused() -> None:
    pool = BlockPool(2, enable_caching=True)
    blocks = pool.get_new_blocks(2)
    with pytest.raises(ValueError, match="1 blocks wanted, 0 are free"):
        pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(ValueError, match="has no user"):
        pool.free_blocks(blocks)
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0, enable_caching=True)


def test_reset_forgets_everything_unless_in_use() -> None:
    pool = BlockPool(2, enable_caching=True)
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(blocks, [name(1)])
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(name(1)) is blocks[0]
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(name(1)) is None
    assert blocks[0].block_hash is None


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(2, enable_caching=False)
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(blocks, [name(1)])
    assert pool.get_cached_block(name(1)) is None


class PoolAgainstModel(RuleBasedStateMachine):
    """Holders take, share, name and free blocks; a model knows who has what and in which order
    free blocks must go."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, enable_caching=True)
        self.users = [0] * 6
        self.content: dict[int, int] = {}
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(6))
        self.next_content = 0

    @rule(target=held, count=st.integers(0, 7))
    def take(self, count: int) -> object:
        if count > len(self.free):
            with pytest.raises(ValueError, match="wanted"):
                self.pool.get_new_blocks(count)
            return multiple()
        blocks = self.pool.get_new_blocks(count)
        assert [b.block_id for b in blocks] == list(self.free)[:count]
        for block in blocks:
            del self.free[block.block_id]
            self.content.pop(block.block_id, None)
            self.users[block.block_id] = 1
        return blocks

    @rule(target=held, content=st.integers(0, 20))
    def find(self, content: int) -> object:
        block = self.pool.get_cached_block(name(content))
        holders = [i for i, c in self.content.items() if c == content]
        if not holders:
            assert block is None
            return multiple()
        assert block is not None
        assert block.block_id in holders
        self.pool.touch([block])
        self.users[block.block_id] += 1
        self.free.pop(block.block_id, None)
        return [block]

    @rule(blocks=held, same=st.booleans())
    def cache(self, blocks: list[KVCacheBlock], same: bool) -> None:
        """Caches blocks; `same` is content that another block may have as well."""
        for block in blocks:
            content = 0 if same else self.next_content
            self.next_content = (self.next_content + 1) % 20
            self.pool.cache_full_blocks([block], [name(content)])
            self.content.setdefault(block.block_id, content)

    @rule(blocks=consumes(held))
    def give_back(self, blocks: list[KVCacheBlock]) -> None:
        self.pool.free_blocks(reversed(blocks))
        for block in reversed(blocks):
            self.users[block.block_id] -= 1
            if self.users[block.block_id] == 0:
                self.free[block.block_id] = None
                if block.block_id not in self.content:
                    self.free.move_to_end(block.block_id, last=False)

    @rule()
    def reset(self) -> None:
        possible = len(self.free) == 6
        assert self.pool.reset_prefix_cache() == possible
        if possible:
            self.content.clear()

    @invariant()
    def same_state(self) -> None:
        assert self.pool.free_queue.block_ids() == list(self.free)
        assert self.pool.num_free_blocks == len(self.free)
        for block in self.pool.blocks:
            assert block.ref_cnt == self.users[block.block_id]
            expected = self.content.get(block.block_id)
            assert block.block_hash == (None if expected is None else name(expected))


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=80, stateful_step_count=40)
