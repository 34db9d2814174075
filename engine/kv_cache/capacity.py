"""Counts what a pool of blocks holds, when every group of layers takes blocks from it."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.layout import KVGroup


def num_blocks_for(groups: Sequence[KVGroup], num_tokens: int) -> int:
    """Returns the blocks of `num_tokens` tokens, over all groups."""
    return sum(group.num_blocks_for(num_tokens) for group in groups)


def tokens_that_fit(groups: Sequence[KVGroup], num_blocks: int) -> int:
    """Returns the most tokens whose blocks in all groups are at most `num_blocks`.

    Windows do not count: a request that comes back after a preemption needs the blocks of all its
    tokens for a moment.
    """
    if len(groups) == 1:
        return num_blocks * groups[0].block_size
    low, high = 0, num_blocks * max(group.block_size for group in groups)
    while low < high:
        middle = (low + high + 1) // 2
        if num_blocks_for(groups, middle) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
