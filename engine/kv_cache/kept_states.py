"""Keeps copies of requests' states where others may find them.

1. `place_to_keep`  where a prompt ends its first part, so that the state is right there; an answer
                    without drafts is at each such place once
2. `keep`           copies it before the next step computes more
3. `settle`         the step is done: the copy can be found, and what a request began with a
                    copy of is given back. Of an answer's copies the last one stays longest
4. `copies_of`      a request that finds one begins with a copy of that
5. `leave`          of an answer only what was kept last goes to host memory
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from engine.contracts.request import Request
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.group_manager import GroupManager, RequestBlocks, StateGroupManager

BlockCopy: TypeAlias = tuple[int, int]
"""A block to copy, over all layers: (source, target)."""

_SPARE = 4
"""States are kept only while this many times their blocks are free: requests come first."""


class KeptStates:
    """Those of all groups that are states, behind multiples of `stride` tokens."""

    def __init__(self, groups: Sequence[GroupManager], pool: BlockPool, stride: int) -> None:
        self._states = [group for group in groups if isinstance(group, StateGroupManager)]
        self._pool = pool
        self._stride = stride

    def copies_of(self, blocks: RequestBlocks) -> list[BlockCopy]:
        """Returns the copies with which a request begins that has found kept states."""
        return [
            (source.block_id, blocks.tables[group.index][0].block_id)
            for source, group in zip(blocks.borrowed, self._states, strict=False)
        ]

    def place_to_keep(self, request: Request) -> int:
        """Returns the number of tokens behind which the request's states shall be kept: the last
        place where a prompt that continues this one could find them, also if they came from
        elsewhere and are those already. 0: nowhere."""
        if not self._states or not self._pool.enable_caching:
            return 0
        place = (request.num_tokens - 1) // self._stride * self._stride
        return place if place >= request.num_computed_tokens else 0

    def keep(self, request: Request, blocks: RequestBlocks, num_tokens: int) -> list[BlockCopy]:
        """Keeps the request's states, which are those behind its first `num_tokens` tokens until
        the next step computes more: where a prefix may end. Nothing is kept that can be found, or
        while blocks are scarce, or earlier copies are not made yet.

        Returns:
            The copies, to be made before that step computes anything.
        """
        if num_tokens % self._stride or blocks.kept or not self._pool.enable_caching:
            return []
        missing = [group for group in self._states if not group.is_kept(request, num_tokens)]
        if not missing or self._pool.num_free_blocks < _SPARE * len(missing):
            return []
        copies = self._pool.get_new_blocks(len(missing))
        blocks.num_kept_tokens = num_tokens
        blocks.kept = [(group.index, copy) for group, copy in zip(missing, copies, strict=True)]
        return [(blocks.tables[group][0].block_id, copy.block_id) for group, copy in blocks.kept]

    def settle(self, request: Request, blocks: RequestBlocks, num_tokens: int) -> None:
        """Releases states that were copied, in a step before the one that computed the last of
        these tokens or in that."""
        self._pool.free_blocks(blocks.borrowed)
        blocks.borrowed = []
        if num_tokens > blocks.num_kept_tokens:
            is_passing = blocks.num_kept_tokens > request.num_prompt_tokens
            for state in self._states:
                for group, block in blocks.kept:
                    if group == state.index:
                        state.publish(request, block, blocks.num_kept_tokens, is_passing)
            copies = [block for _, block in blocks.kept]
            self._pool.free_blocks(copies)
            blocks.kept = []
            if is_passing:
                self._pool.yield_first(blocks.passing)
                blocks.passing = [(block, block.block_hash) for block in copies]

    def leave(self, blocks: RequestBlocks) -> None:
        """Comes when the request gives up its blocks."""
        for block, name in blocks.passing:
            if block.block_hash == name:
                self._pool.tell(block)
