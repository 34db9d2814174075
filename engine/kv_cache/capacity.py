"""Counts what a pool of blocks holds, when every group of layers takes blocks from it."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from kv_transfer.group_sizes import LONGEST
from kv_transfer.layout import STATE_SPAN, KVGroup, own_groups

_STEPS_AHEAD = 2
"""One is computed while the next is scheduled."""


def windows_roll(groups: Sequence[KVGroup]) -> bool:
    """Returns whether a request has blocks of windows for its next steps alone: beside rows that
    stand for several tokens they would take far more than what is kept."""
    return any(group.compress_ratio > 1 for group in groups)


def hit_stride(groups: Sequence[KVGroup]) -> int:
    """Returns the tokens at whose multiples a prefix can be found: where the blocks of all groups
    end, and no window reaches further back than to the one before. Where rows of many tokens lie
    in blocks of others, all ends are near, and what windows have there takes more than the rows in
    between: then it is every eighth."""
    end = lcm(*(group.block_size for group in groups if not group.is_state))
    reach = max((group.window or 1) + group.window_align - 2 for group in groups)
    shared = [group.block_size for group in groups if group.blocks_of >= 0]
    reach = max(reach, LONGEST * min(shared, default=0))
    return end * max(1, -(-reach // end))


def blocks_at_once(group: KVGroup, num_tokens: int, step_tokens: int, stride: int) -> int:
    """Returns the most blocks of a window that a request of `num_tokens` tokens has at once, whose
    steps compute up to `step_tokens` of them each. What is left for open rows is kept at the end of
    a step, and where a prefix can be found: at multiples of `stride`."""
    size, overlap = group.block_size, (group.window or 1) - 1
    reach = overlap + group.window_align - 1
    most = min(
        group.num_blocks_for(num_tokens), -(-(reach + _STEPS_AHEAD * step_tokens) // size) + 1
    )
    if not group.is_open:
        return most
    at_end, found = -(-reach // size) + 1, -(-overlap // size) + (overlap > 0)
    return min(most, _STEPS_AHEAD * (at_end + (step_tokens // stride + 1) * found))


def blocks_besides(groups: Sequence[KVGroup], step_tokens: int) -> int:
    """Returns the blocks that each request takes whatever its length: of states, and of windows
    that roll with steps of `step_tokens`."""
    rolls, stride = windows_roll(groups), hit_stride(groups)
    return sum(
        blocks_at_once(group, STATE_SPAN, step_tokens, stride) if not group.is_state else 1
        for group in own_groups(groups)
        if group.is_state or (rolls and group.window is not None)
    )


def blocks_a_token(groups: Sequence[KVGroup]) -> float:
    """Returns the blocks that each token more takes, over all groups."""
    rolls = windows_roll(groups)
    return sum(
        1 / group.block_size
        for group in own_groups(groups)
        if not (group.is_state or (rolls and group.window is not None))
    )


def num_entries(groups: Sequence[KVGroup], num_tokens: int) -> int:
    """Returns the entries that tables of `num_tokens` tokens have, over all groups."""
    return sum(group.num_blocks_for(num_tokens) for group in own_groups(groups))


def num_blocks_for(
    groups: Sequence[KVGroup], num_tokens: int, step_tokens: int = STATE_SPAN
) -> int:
    """Returns the blocks of `num_tokens` tokens, over all groups; of windows that roll, those for
    steps of up to `step_tokens`."""
    rolls, stride = windows_roll(groups), hit_stride(groups)
    return sum(
        blocks_at_once(group, num_tokens, step_tokens, stride)
        if rolls and group.window is not None
        else group.num_blocks_for(num_tokens)
        for group in own_groups(groups)
    )


def tokens_that_fit(
    groups: Sequence[KVGroup], num_blocks: int, step_tokens: int = STATE_SPAN
) -> int:
    """Returns the most tokens whose blocks in all groups are at most `num_blocks`.

    Windows count as a whole, unless they roll: a request that comes back after a preemption needs
    the blocks of all its tokens for a moment.
    """
    if len(groups) == 1:
        return num_blocks * groups[0].block_size
    low, high = 0, num_blocks * max(group.block_size for group in groups)
    while low < high:
        middle = (low + high + 1) // 2
        if num_blocks_for(groups, middle, step_tokens) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
