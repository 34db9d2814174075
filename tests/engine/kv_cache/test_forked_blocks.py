"""Blocks of one prompt among its choices: who uses which, what is copied, what is left."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_cache.group_manager import NULL_BLOCK
from engine.kv_cache.kv_cache_manager import KVCacheManager
from kv_transfer.layout import KVGroup
from tests.engine.kv_cache.test_kv_cache_manager import make_request
from tests.engine.kv_cache.test_kv_groups import FULL, WINDOW, group, make_manager, start

SHAPES = [(FULL,), (FULL, WINDOW), (WINDOW, group(8)), (group(4, window=1), group(16))]


def users(manager: KVCacheManager) -> Counter[int]:
    return Counter(
        block.block_id
        for request_id in manager.request_ids()
        for block in manager.held_blocks(request_id)
    )


def check_counts(manager: KVCacheManager) -> None:
    counted = users(manager)
    assert all(block.ref_cnt == counted[block.block_id] for block in manager.block_pool.blocks)
    assert manager.num_free_blocks == manager.num_blocks - len(counted)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    length=st.integers(1, 25),
    num_choices=st.integers(1, 5),
    groups=st.sampled_from(SHAPES),
    caching=st.booleans(),
)
def test_users_of_each_block(
    seed: int, length: int, num_choices: int, groups: tuple[KVGroup, ...], caching: bool
) -> None:
    """Choices fork, grow, and leave in any order; the last one to fork takes what is left."""
    rng = random.Random(seed)
    manager = KVCacheManager(60, groups, enable_caching=caching)
    tokens = [rng.randint(0, 1) for _ in range(length)]
    prompt = make_request(tokens, "prompt")
    start(manager, prompt)
    manager.confirm(prompt, length)
    waiting = [make_request(tokens, f"{i}") for i in range(num_choices)]
    forked = []
    while waiting or forked:
        if waiting and rng.random() < 0.5:
            choice = waiting.pop()
            choice.append_output_token(2 + len(waiting))
            tables = [list(table) for table in manager.get_blocks("prompt").tables]
            takes_all = not waiting
            copies = manager.fork(prompt, choice, takes_all=takes_all)
            assert copies is not None
            check_tables(manager, tables, choice.request_id, length, copies, takes_all)
            forked.append(choice)
        elif forked:
            choice = rng.choice(forked)
            if len(choice.all_token_ids) > length + 6 or rng.random() < 0.3:
                forked.remove(choice)
                manager.free(choice)
            else:
                blocks = manager.get_blocks(choice.request_id)
                assert manager.grow(blocks, choice.num_tokens + 1) is not None
                choice.append_output_token(9)
                manager.confirm(choice, choice.num_tokens - 1)
        check_counts(manager)
    assert manager.request_ids() == []
    assert manager.num_free_blocks == 60


def check_tables(
    manager: KVCacheManager,
    before: list[list[object]],
    request_id: str,
    length: int,
    copies: list[tuple[int, int]],
    takes_all: bool,
) -> None:
    """Compares a choice's tables with those that the prompt had when it forked."""
    expected: list[tuple[int, int]] = []
    for shape, old, new in zip(
        manager._shapes, before, manager.get_blocks(request_id).tables, strict=True
    ):
        num_full, partial = divmod(length, shape.block_size)
        assert new[:num_full] == old[:num_full]
        assert len(new) == shape.num_blocks_for(length + 1)
        assert new[-1] is not NULL_BLOCK
        if partial and takes_all:
            assert new[num_full] is old[num_full]
        elif partial:
            expected.append((old[num_full].block_id, new[num_full].block_id))  # type: ignore[attr-defined]
            assert new[num_full].ref_cnt == 1
            assert new[num_full].block_hash is None
    assert copies == expected
    assert all(source != target for source, target in copies)


def test_nothing_changes_when_blocks_are_short() -> None:
    manager = make_manager(FULL, num_blocks=5)
    prompt, choice = make_request(list(range(14)), "prompt"), make_request(list(range(14)), "0")
    start(manager, prompt)
    choice.append_output_token(3)
    assert manager.fork(prompt, choice, headroom=1) is None
    assert list(manager.request_ids()) == ["prompt"]
    check_counts(manager)
    assert manager.fork(prompt, choice) == [(3, 4)]
    check_counts(manager)
    assert manager.fork(prompt, make_request(list(range(15)), "1")) is None
    assert manager.fork(prompt, make_request(list(range(15)), "1"), takes_all=True) == []
    assert sorted(manager.request_ids()) == ["0", "1"]


def test_a_choice_publishes_its_own_blocks_and_finds_the_prompt_s() -> None:
    manager = make_manager(FULL)
    prompt, choice = make_request(list(range(6)), "prompt"), make_request(list(range(6)), "0")
    start(manager, prompt)
    manager.confirm(prompt, 6)
    choice.append_output_token(6)
    manager.fork(prompt, choice)
    for token in (7, 8):
        choice.append_output_token(token)
    manager.grow(manager.get_blocks("0"), 9)
    manager.confirm(choice, 8)
    found, num_tokens = manager.get_computed_blocks(make_request(list(range(9)), "later"), 8)
    assert num_tokens == 8
    assert found[0] == manager.get_blocks("0").tables[0][:2]
