"""Blocks by request: prefixes found, slots drawn, content published, tails freed first."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request import Request
from engine.contracts.request_spec import RequestSpec
from engine.kv_cache.block import KVCacheBlock
from engine.kv_cache.block_hash import extend_block_hashes, pack_tokens, root_hash
from engine.kv_cache.kv_cache_manager import KVCacheManager
from kv_transfer.layout import attention_group

BLOCK_SIZE = 4


def make_request(tokens: list[int], request_id: str = "a", salt: str = "") -> Request:
    return Request(
        EngineCoreRequest(
            request_id=request_id,
            spec=RequestSpec(tokens, cache_salt=salt),
        )
    )


def hashes_of(tokens: list[int], salt: str = "") -> list[bytes]:
    request = make_request(tokens, salt=salt)
    return extend_block_hashes(request, BLOCK_SIZE)


# Hashes -----------------------------------------------------------------------------------------


def test_hashes_are_a_chain_over_whole_blocks() -> None:
    first = hashlib.sha256(root_hash(RequestSpec()) + struct.pack("<4i", 1, 2, 3, 4)).digest()
    second = hashlib.sha256(first + struct.pack("<4i", 5, 6, 7, 8)).digest()
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 8, 9]) == [first, second]


def test_hashes_are_the_same_in_another_process() -> None:
    code = (
        "from tests.engine.kv_cache.test_kv_cache_manager import hashes_of\n"
        "print(hashes_of(list(range(8)), 'salt')[-1].hex())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert other.stdout.strip() == hashes_of(list(range(8)), "salt")[-1].hex()


def test_hashes_grow_with_the_tokens() -> None:
    request = make_request([1, 2, 3])
    assert extend_block_hashes(request, BLOCK_SIZE) == []
    for token in range(4, 10):
        request.append_output_token(token)
        extend_block_hashes(request, BLOCK_SIZE)
    assert request.block_hashes[BLOCK_SIZE] == hashes_of([1, 2, 3, 4, 5, 6, 7, 8, 9])


tokens_strategy = st.lists(st.integers(0, 2), min_size=0, max_size=17)


@given(tokens_strategy, tokens_strategy, st.sampled_from(["", "x"]), st.sampled_from(["", "x"]))
def test_hashes_are_equal_exactly_when_the_prefix_is(
    ours: list[int], theirs: list[int], our_salt: str, their_salt: str
) -> None:
    pairs = zip(hashes_of(ours, our_salt), hashes_of(theirs, their_salt), strict=False)
    for index, (mine, other) in enumerate(pairs):
        stop = (index + 1) * BLOCK_SIZE
        assert (mine == other) == (ours[:stop] == theirs[:stop] and our_salt == their_salt)


def test_packed_tokens_are_little_endian_int32() -> None:
    assert pack_tokens([1, 256, 151_935]) == struct.pack("<3i", 1, 256, 151_935)


# Manager ----------------------------------------------------------------------------------------


@pytest.fixture
def manager() -> KVCacheManager:
    return one_group()


def one_group() -> KVCacheManager:
    group = attention_group(layers=[0], heads=1, head_dim=1, dtype="float32", block_size=BLOCK_SIZE)
    return KVCacheManager(8, [group], enable_caching=True)


def table_of(manager: KVCacheManager, request_id: str) -> list[KVCacheBlock]:
    (table,) = manager.get_blocks(request_id).tables
    return table


def compute(manager: KVCacheManager, request: Request) -> None:
    """Gives blocks and KV to all of the request's tokens."""
    cached, _ = manager.get_computed_blocks(request, request.num_tokens - 1)
    assert manager.allocate_slots(request, request.num_tokens, cached) is not None
    manager.confirm(request, request.num_tokens)


def test_slots_are_drawn_as_tokens_need_them(manager: KVCacheManager) -> None:
    request = make_request([1] * 6)
    blocks = manager.allocate_slots(request, 6)
    assert blocks is not None
    first = manager.get_block_ids("a")[0]
    assert len(first) == 2
    assert manager.grow(blocks, 8) == []
    more = manager.grow(blocks, 9)
    assert more is not None
    assert [(group, len(ids)) for group, ids in more] == [(0, 1)]
    assert manager.get_block_ids("a") == (first + more[0][1],)
    manager.free(request)
    assert manager.num_free_blocks == 8
    assert manager.request_ids() == []


def test_nothing_changes_when_blocks_are_short(manager: KVCacheManager) -> None:
    big = make_request(list(range(28)), "big")
    compute(manager, big)
    manager.free(big)
    assert manager.num_free_blocks == 8
    holder = make_request([9] * 8, "holder")
    holds = manager.allocate_slots(holder, 8)
    assert holds is not None
    again = make_request(list(range(28)), "again")
    cached, num_cached = manager.get_computed_blocks(again, 27)
    assert num_cached == 24
    assert not manager.can_allocate(29, cached)
    assert manager.allocate_slots(again, 29, cached) is None
    assert manager.request_ids() == ["holder"]
    assert manager.num_free_blocks == 6
    assert manager.grow(holds, 60) is None
    assert len(table_of(manager, "holder")) == 2


def test_headroom_is_kept(manager: KVCacheManager) -> None:
    assert manager.can_allocate(24, [[]], headroom=2)
    assert not manager.can_allocate(25, [[]], headroom=2)


@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_one_token_is_always_left_to_compute(
    manager: KVCacheManager, length: int, found: int
) -> None:
    request = make_request(list(range(length)))
    compute(manager, request)
    same = make_request(list(range(length)), "b")
    (blocks,), count = manager.get_computed_blocks(same, length - 1)
    assert (len(blocks) * BLOCK_SIZE, count) == (found, found)


def test_a_hit_ends_at_the_first_block_that_is_missing(manager: KVCacheManager) -> None:
    request = make_request(list(range(16)))
    compute(manager, request)
    manager.free(request)
    pool = manager.block_pool
    block_hash = request.block_hashes[BLOCK_SIZE][1]
    second = pool.get_cached_block(block_hash)
    assert second is not None
    pool._cached.remove(block_hash, second)
    second.block_hash = None
    _, count = manager.get_computed_blocks(make_request(list(range(16)), "b"), 15)
    assert count == 4


def test_only_full_blocks_with_kv_are_published(manager: KVCacheManager) -> None:
    request = make_request(list(range(11)))
    assert manager.allocate_slots(request, 11) is not None
    manager.confirm(request, 7)
    assert [b.block_hash is not None for b in table_of(manager, "a")] == [True, False, False]
    manager.confirm(request, 11)
    assert [b.block_hash is not None for b in table_of(manager, "a")] == [True, True, False]


def test_the_tail_is_taken_first(manager: KVCacheManager) -> None:
    request = make_request(list(range(16)))
    compute(manager, request)
    (ids,) = manager.get_block_ids("a")
    manager.free(request)
    taken = [block.block_id for block in manager.block_pool.get_new_blocks(8)]
    # Blocks that hold nothing go before all that do.
    assert taken[4:] == ids[::-1]


def test_shared_blocks_stay_until_the_last_user_left(manager: KVCacheManager) -> None:
    first, second = make_request(list(range(9)), "a"), make_request(list(range(9)), "b")
    compute(manager, first)
    compute(manager, second)
    assert table_of(manager, "a")[:2] == table_of(manager, "b")[:2]
    assert manager.num_free_blocks == 4
    manager.free(first)
    assert manager.num_free_blocks == 5
    assert not manager.reset_prefix_cache()
    manager.free(second)
    assert manager.num_free_blocks == 8
    assert manager.reset_prefix_cache()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.booleans()),
        max_size=25,
    )
)
def test_a_hit_always_has_the_right_content(history: list[tuple[list[int], bool]]) -> None:
    """Requests come and go; `content` is what a block's KV was computed from."""
    manager = one_group()
    content: dict[int, tuple[int, ...]] = {}
    live: list[Request] = []
    for number, (tokens, leave) in enumerate(history):
        request = make_request(tokens, str(number))
        cached, num_cached = manager.get_computed_blocks(request, len(tokens) - 1)
        assert num_cached < len(tokens)
        for index, block in enumerate(cached[0]):
            assert content[block.block_id] == tuple(tokens[: (index + 1) * BLOCK_SIZE])
        while manager.allocate_slots(request, len(tokens), cached) is None:
            manager.free(live.pop(0))
            cached, num_cached = manager.get_computed_blocks(request, len(tokens) - 1)
        for index, block in enumerate(table_of(manager, str(number))):
            content[block.block_id] = tuple(tokens[: (index + 1) * BLOCK_SIZE])
        manager.confirm(request, len(tokens))
        live.append(request)
        if leave:
            manager.free(live.pop(0))
    for request in live:
        manager.free(request)
    assert manager.num_free_blocks == 8
    assert manager.request_ids() == []
