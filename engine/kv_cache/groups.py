"""Builds one manager for each group of layers, over one pool."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.capacity import hit_stride, windows_roll
from engine.kv_cache.group_manager import GroupManager, StateGroupManager, WindowGroupManager
from engine.kv_cache.rolling_windows import OpenRowsManager, RollingWindowManager
from kv_transfer.layout import KVGroup, own_groups


def create_group_managers(
    groups: Sequence[KVGroup], pool: BlockPool, step_tokens: int
) -> list[GroupManager]:
    """Returns the managers of groups with blocks of their own, whose steps compute up to
    `step_tokens` of a request."""
    stride = state_stride(groups)
    rolls, end = windows_roll(groups), hit_stride(groups)

    def create(index: int, group: KVGroup) -> GroupManager:
        if group.is_state:
            return StateGroupManager(index, group, pool, stride)
        if group.window is None:
            return GroupManager(index, group, pool)
        if rolls:
            kind = OpenRowsManager if group.is_open else RollingWindowManager
            return kind(index, group, pool, end, step_tokens)
        return WindowGroupManager(index, group, pool)

    return [create(index, group) for index, group in enumerate(own_groups(groups))]


def chain_sizes(groups: Sequence[KVGroup]) -> tuple[int, ...]:
    """Returns the tokens of the blocks whose hashes all names are made of, ascending."""
    stride, end = state_stride(groups), hit_stride(groups)
    end_of_windows = end if windows_roll(groups) else 0

    def size(group: KVGroup) -> int:
        if group.is_state:
            return stride
        return group.block_size if group.window is None else end_of_windows or group.block_size

    return tuple(sorted({size(group) for group in own_groups(groups)}))


def state_stride(groups: Sequence[KVGroup]) -> int:
    """Returns the tokens of the largest blocks: where these end, all others do."""
    return max(group.block_size for group in groups if not group.is_state)
