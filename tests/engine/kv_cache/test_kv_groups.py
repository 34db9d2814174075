"""Several groups over one pool: windows give blocks back, a hit is what all groups can serve."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contracts.request import Request
from engine.kv_cache.capacity import num_blocks_for, tokens_that_fit
from engine.kv_cache.group_manager import NULL_BLOCK
from engine.kv_cache.kv_cache_manager import KVCacheManager
from kv_transfer.layout import KVGroup, attention_group
from tests.engine.kv_cache.test_kv_cache_manager import make_request

NUM_BLOCKS = 24


def group(block_size: int, window: int | None = None) -> KVGroup:
    return attention_group(
        layers=[0], heads=1, head_dim=1, dtype="float32", block_size=block_size, window=window
    )


FULL, WINDOW = group(4), group(4, window=6)


def make_manager(*groups: KVGroup, num_blocks: int = NUM_BLOCKS) -> KVCacheManager:
    return KVCacheManager(num_blocks, groups or (FULL, WINDOW), enable_caching=True)


def has_block(manager: KVCacheManager, request_id: str, index: int) -> list[bool]:
    """Returns, by logical block of a group, whether the request has one there."""
    table = manager.get_blocks(request_id).tables[index]
    return [block is not NULL_BLOCK for block in table]


def start(manager: KVCacheManager, request: Request) -> int:
    """Gives blocks to all known tokens; returns how many came from the cache."""
    cached, num_cached = manager.get_computed_blocks(request, request.num_tokens - 1)
    assert manager.allocate_slots(request, request.num_tokens, cached) is not None
    return num_cached


def test_a_window_gives_blocks_back_as_the_request_advances() -> None:
    manager = make_manager()
    request = make_request(list(range(20)))
    start(manager, request)
    assert manager.num_free_blocks == NUM_BLOCKS - 10
    # Token 9 sees tokens from 4 on, token 13 those from 8 on.
    manager.confirm(request, 8)
    assert has_block(manager, "a", 1) == [True] * 5
    manager.confirm(request, 9)
    assert has_block(manager, "a", 1) == [False, True, True, True, True]
    manager.confirm(request, 20)
    assert has_block(manager, "a", 1) == [False, False, False, True, True]
    assert has_block(manager, "a", 0) == [True] * 5
    assert manager.num_free_blocks == NUM_BLOCKS - 7
    assert manager.grow(manager.get_blocks("a"), 21) is not None
    assert [len(ids) for ids in manager.get_block_ids("a")] == [6, 6]
    manager.free(request)
    assert manager.num_free_blocks == NUM_BLOCKS


def test_without_a_prefix_cache_windows_still_give_blocks_back() -> None:
    manager = KVCacheManager(NUM_BLOCKS, (FULL, WINDOW), enable_caching=False)
    request = make_request(list(range(20)))
    start(manager, request)
    assert manager.confirms_blocks
    manager.confirm(request, 20)
    assert manager.num_free_blocks == NUM_BLOCKS - 7


def test_a_hit_needs_only_the_blocks_inside_the_window() -> None:
    manager = make_manager()
    first = make_request(list(range(20)), "a")
    start(manager, first)
    manager.confirm(first, 20)
    manager.free(first)
    # What the window gave back was published before, and is taken for something else now.
    taken = manager.block_pool.get_new_blocks(NUM_BLOCKS - 10 + 3)
    manager.block_pool.free_blocks(taken)
    second = make_request([*list(range(20)), 99], "b")
    assert start(manager, second) == 20
    assert has_block(manager, "b", 1) == [False, False, False, True, True, True]
    assert has_block(manager, "b", 0) == [True] * 6


@pytest.mark.parametrize(
    ("lost_group", "lost_block", "found"),
    # Full: the hit ends where a block is missing. Window: a gap ends hits whose window has it; a
    # hit of 16 sees tokens from 11 on, one of 12 from 7, one of 8 from 3, one of 4 from 0.
    [(0, 4, 16), (0, 2, 8), (0, 0, 0), (1, 4, 16), (1, 3, 12), (1, 2, 20), (1, 0, 20)],
)
def test_a_hit_ends_where_any_group_lacks_something(
    lost_group: int, lost_block: int, found: int
) -> None:
    manager = make_manager()
    first = make_request(list(range(20)), "a")
    start(manager, first)
    lost = manager.get_blocks("a").tables[lost_group][lost_block]
    for index in range(2):
        manager._groups[index].confirm(first, manager.get_blocks("a"), 20)
    assert lost.block_hash is not None
    manager.block_pool._cached.remove(lost.block_hash, lost)
    lost.block_hash = None
    _, count = manager.get_computed_blocks(make_request([*list(range(20)), 99], "b"), 20)
    assert count == found


def test_groups_with_other_block_sizes_meet_where_both_have_whole_blocks() -> None:
    manager = make_manager(group(4), group(6, window=5))
    first = make_request(list(range(30)), "a")
    start(manager, first)
    manager.confirm(first, 30)
    _, count = manager.get_computed_blocks(make_request(list(range(30)), "b"), 29)
    assert count == 24
    assert manager.num_blocks_more(13) == 4 + 3
    assert manager.capacity(manager.get_blocks("a")) == 30


def test_groups_never_find_each_other_s_blocks() -> None:
    manager = make_manager(group(4), group(4))
    request = make_request(list(range(8)), "a")
    start(manager, request)
    manager.confirm(request, 8)
    (of_first, of_second), count = manager.get_computed_blocks(make_request(list(range(9))), 8)
    assert count == 8
    assert [of_first, of_second] == manager.get_blocks("a").tables
    assert not {b.block_id for b in of_first} & {b.block_id for b in of_second}


def test_blocks_that_a_peer_leaves_out_are_neither_taken_nor_published() -> None:
    manager = make_manager()
    request = make_request(list(range(18)))
    tables = manager.without_unseen([[], []], 18)
    assert manager.can_allocate(19, tables, headroom=NUM_BLOCKS - 5 - 2)
    assert manager.allocate_slots(request, 19, tables, 18) is not None
    # Token 18 sees tokens from 13 on: block 3 may have come in part.
    assert has_block(manager, "a", 1) == [False, False, False, True, True]
    assert manager.can_continue(18, 18)
    assert not manager.can_continue(17, 18)
    assert manager.can_continue(4, 5)
    manager.confirm(request, 18)
    published = [block.block_hash for block in manager.get_blocks("a").tables[1][3:]]
    assert published == [None, None]
    manager.free(request)
    assert manager.num_free_blocks == NUM_BLOCKS


def test_a_first_block_that_came_in_part_is_not_published() -> None:
    manager = make_manager()
    request = make_request(list(range(8)))
    assert manager.allocate_slots(request, 9, manager.without_unseen([[], []], 8), 8) is not None
    # Token 8 sees tokens from 3 on.
    manager.confirm(request, 8)
    of_window = manager.get_blocks("a").tables[1]
    assert [block.block_hash is not None for block in of_window] == [False, True, False]


def test_capacity_counts_all_groups() -> None:
    groups = (group(4), group(8, window=3))
    assert num_blocks_for(groups, 9) == 3 + 2
    assert tokens_that_fit(groups, 5) == 12
    assert tokens_that_fit(groups, 0) == 0
    assert tokens_that_fit((FULL,), 7) == 28


def test_nothing_changes_when_one_group_cannot_grow() -> None:
    manager = make_manager(num_blocks=7)
    request = make_request(list(range(12)))
    start(manager, request)
    assert manager.grow(manager.get_blocks("a"), 13) is None
    assert [len(ids) for ids in manager.get_block_ids("a")] == [3, 3]
    assert manager.num_free_blocks == 1


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=24), st.booleans()),
        max_size=20,
    ),
    st.integers(1, 9),
    st.sampled_from([4, 8]),
)
def test_what_a_hit_sees_has_the_right_content(
    history: list[tuple[list[int], bool]], window: int, block_size: int
) -> None:
    """Requests come, are confirmed in parts, and go. `content` is what a block was filled with, by
    its group and all tokens up to its end; a hit reads every block that its next token sees."""
    groups = (group(4), group(block_size, window))
    manager = make_manager(*groups)
    content: dict[int, tuple[int, tuple[int, ...]]] = {}
    live: list[Request] = []
    for number, (tokens, leave) in enumerate(history):
        request = make_request(tokens, str(number))
        cached, num_cached = manager.get_computed_blocks(request, len(tokens) - 1)
        while not manager.can_allocate(len(tokens), cached):
            manager.free(live.pop(0))
            cached, num_cached = manager.get_computed_blocks(request, len(tokens) - 1)
        assert num_cached < len(tokens)
        for index, (shape, table) in enumerate(zip(groups, cached, strict=True)):
            assert len(table) * shape.block_size == num_cached
            for logical in range(shape.first_block_seen(num_cached), len(table)):
                end = (logical + 1) * shape.block_size
                assert content[table[logical].block_id] == (index, tuple(tokens[:end]))
        assert manager.allocate_slots(request, len(tokens), cached) is not None
        for done in (num_cached + (len(tokens) - num_cached) // 2, len(tokens)):
            for index, table in enumerate(manager.get_blocks(str(number)).tables):
                for logical in range(done // groups[index].block_size):
                    end = (logical + 1) * groups[index].block_size
                    if table[logical] is not NULL_BLOCK and end > num_cached:
                        content[table[logical].block_id] = (index, tuple(tokens[:end]))
            manager.confirm(request, done)
        live.append(request)
        if leave:
            manager.free(live.pop(0))
    for request in live:
        manager.free(request)
    assert manager.num_free_blocks == NUM_BLOCKS
    assert manager.request_ids() == []
