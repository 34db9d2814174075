"""Blocks that requests take as their windows roll on, which others may not have meanwhile.

1. `roll_on`   takes those of a step, or of what comes from elsewhere
2. `settle`    promises what the request may still have to take at once
3. `extend`    takes those of the next step out of the promise
4. `skip_to`   all before a place comes from elsewhere: the tables begin anew where that ends
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.group_manager import NULL_BLOCK, BlockTables, GroupManager, RequestBlocks
from engine.kv_cache.rolling_windows import UNWRITTEN, RollingWindowManager

GrownTables: TypeAlias = list[tuple[int, list[int]]]
"""The (group, ids of new blocks) of each group that got some."""


class PromisedBlocks:
    """Those of all groups that are windows which roll; often there is none."""

    def __init__(self, groups: Sequence[GroupManager], pool: BlockPool) -> None:
        self.windows = [one for one in groups if isinstance(one, RollingWindowManager)]
        self.count = 0
        """Free blocks that requests will take in steps to come."""
        self._pool = pool

    @property
    def num_free(self) -> int:
        """Returns the blocks that are neither used nor promised."""
        return self._pool.num_free_blocks - self.count

    def roll_on(self, tables: BlockTables, num_tokens: int) -> GrownTables | None:
        """Lengthens tables up to `num_tokens` tokens. None: there are not enough free blocks, and
        nothing changed."""
        wanted = [one.entries_for(tables[one.index], num_tokens) for one in self.windows]
        if sum(map(sum, wanted)) > self.num_free:
            return None
        grown: GrownTables = []
        for group, entries in zip(self.windows, wanted, strict=True):
            blocks = iter(self._pool.get_new_blocks(sum(entries)))
            more = [next(blocks) if is_block else UNWRITTEN for is_block in entries]
            tables[group.index] += more
            if more:
                grown.append((group.index, [block.block_id for block in more]))
        return grown

    def settle(self, blocks: RequestBlocks) -> None:
        promised = sum(group.num_promised(blocks) for group in self.windows)
        self.count += promised - blocks.num_promised
        blocks.num_promised = promised

    def extend(self, blocks: RequestBlocks, num_tokens: int) -> GrownTables | None:
        """Rolls on for a step of the prompt up to `num_tokens` tokens. What the request was
        promised is there."""
        if not self.windows:
            return []
        own, blocks.num_promised = blocks.num_promised, 0
        self.count -= own
        grown = self.roll_on(blocks.tables, num_tokens)
        self.settle(blocks)
        return grown

    def skip_to(self, blocks: RequestBlocks, num_tokens: int) -> bool:
        """Gives a request whose first `num_tokens` tokens come from elsewhere what the next one
        sees of them. Returns False where blocks are lacking; then it must begin anew."""
        for group in self.windows:
            table, first = blocks.tables[group.index], group.num_unseen(num_tokens)
            if first > len(table):
                self._pool.free_blocks(reversed(group.held(table)))
                table[:] = [NULL_BLOCK] * first
        return self.extend(blocks, num_tokens) is not None
