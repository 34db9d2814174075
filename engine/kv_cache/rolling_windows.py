"""Manages windows of which a request has blocks for its next steps only, not for all of its prompt.

Beside rows that stand for many tokens, a token of the window or of a row that is still open takes
tens of times what is kept of it for good. So these tables grow chunk by chunk, and the request is
promised as many blocks as it has at once:

    table     [null][null][null][ b3 ][ b4 ][ b5 ][ b6 ]  . . .
               no later token sees   | step | next step | not yet
    promised  what is missing of the most that it has at once, while its prompt is not all covered

Others find a prefix at multiples of `stride` alone, where every group has whole blocks. What is
seen there keeps its content when it is given back; all else is the first to be taken again.

A step has what its own tokens leave for open rows at hand, so these go to the cache only where a
later step reads them:

    open      [null][    ][    ][ b1 ][    ][    ][ b2 ]   b1: a prefix may be found behind it
                     the step's tokens                     b2: the next step reads it
"""

from __future__ import annotations

from engine.contracts.request import Request
from engine.kv_cache.block import KVCacheBlock
from engine.kv_cache.block_hash import (
    BlockHash,
    Named,
    extend_block_hashes,
    hash_block_tokens,
    pack_tokens,
)
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.capacity import blocks_at_once
from engine.kv_cache.group_manager import (
    NULL_BLOCK,
    IsBehind,
    RequestBlocks,
    WindowGroupManager,
)
from kv_transfer.layout import KVGroup

UNWRITTEN = KVCacheBlock(-1)
"""Stands where a table never has a block: slots in it are negative, so nothing is written there."""
UNWRITTEN.ref_cnt = 1
UNWRITTEN.block_hash = b""


class RollingWindowManager(WindowGroupManager):
    """Keeps tables whose blocks come and go with the steps."""

    def __init__(
        self, index: int, group: KVGroup, pool: BlockPool, stride: int, step_tokens: int
    ) -> None:
        super().__init__(index, group, pool)
        self._stride = stride
        self._step_tokens = step_tokens

    def find_cached(
        self, request: Request, num_tokens: int, known: list[KVCacheBlock] | None
    ) -> tuple[list[KVCacheBlock], int]:
        for length in self._lengths(request, num_tokens):
            table = self.run_in_cache(request, length)
            if len(table) == length // self.block_size:
                return table, length
        return [], 0

    def run_in_cache(self, request: Named, num_tokens: int) -> list[KVCacheBlock]:
        found = [NULL_BLOCK] * self._group.first_block_seen(num_tokens)
        for name in self.names(request, num_tokens):
            if (block := self._pool.get_cached_block(name)) is None:
                break
            found.append(block)
        return found

    def find_behind(self, request: Named, num_tokens: int, is_behind: IsBehind) -> int:
        for length in self._lengths(request, num_tokens):
            run = len(self.run_in_cache(request, length))
            if all(is_behind(name) for name in self.names_behind(request, run, length)):
                return length
        return 0

    def names_behind(self, request: Named, first: int, num_tokens: int) -> list[BlockHash]:
        return self.names(request, num_tokens)[first - self._group.first_block_seen(num_tokens) :]

    def names_wanted(self, request: Request, num_before: int, num_tokens: int) -> list[BlockHash]:
        lengths = [one for one in self._lengths(request, num_tokens) if one > num_before]
        return [name for length in lengths for name in self.names(request, length)]

    def names(self, request: Named, num_tokens: int) -> list[BlockHash]:
        """Returns the names of the blocks that are seen behind `num_tokens` tokens, which are whole
        strides: the hash of those says all, but which of the blocks it is."""
        parent = extend_block_hashes(request, self._stride)[num_tokens // self._stride - 1]
        num_seen = num_tokens // self.block_size - self._group.first_block_seen(num_tokens)
        return [
            hash_block_tokens(parent, pack_tokens([-1 - place])) + self._tag
            for place in range(num_seen)
        ]

    def _lengths(self, request: Named, num_tokens: int) -> list[int]:
        """Returns where a prefix of at most `num_tokens` tokens may end, the longest first."""
        num_known = len(extend_block_hashes(request, self._stride))
        most = min(num_tokens // self._stride, num_known)
        return [count * self._stride for count in range(most, 0, -1)]

    def num_wanted(self, num_tokens: int, table: list[KVCacheBlock]) -> int:
        num_null = num_leading_nulls(table)
        num_left = self._group.num_blocks_for(num_tokens) - num_null
        most = min(self._num_at_once(num_tokens), num_left)
        return most - sum(block.ref_cnt > 0 for block in table[num_null:])

    def num_promised(self, blocks: RequestBlocks) -> int:
        """Returns how many blocks the request may still have to take at once for its prompt."""
        table, num_tokens = blocks.tables[self.index], blocks.num_prompt_tokens
        num_missing = self._group.num_blocks_for(num_tokens) - len(table)
        if num_missing <= 0:
            return 0
        num_held = len(self.held(table[num_leading_nulls(table) :]))
        return max(0, min(num_missing, self._num_at_once(num_tokens) - num_held))

    def entries_for(self, table: list[KVCacheBlock], num_tokens: int) -> list[bool]:
        """Returns for each entry that a table lacks for a step up to `num_tokens` tokens whether it
        is a block."""
        return [True] * (self._group.num_blocks_for(num_tokens) - len(table))

    def _num_at_once(self, num_tokens: int) -> int:
        return blocks_at_once(self._group, num_tokens, self._step_tokens, self._stride)

    def confirm(self, request: Request, blocks: RequestBlocks, num_tokens: int) -> None:
        self._publish(request, blocks, num_tokens)
        self._free_unseen(blocks, num_tokens)

    def _publish(self, request: Request, blocks: RequestBlocks, num_tokens: int) -> None:
        if not self._pool.enable_caching:
            return
        published, table = blocks.num_published[self.index], blocks.tables[self.index]
        first = published * self.block_size // self._stride + 1
        for count in range(first, num_tokens // self._stride + 1):
            length = count * self._stride
            start = max(published, self._group.first_block_seen(length))
            published = length // self.block_size
            names = self.names_behind(request, start, length)
            self._pool.cache_full_blocks(table[start:published], names)
        blocks.num_published[self.index] = published


class OpenRowsManager(RollingWindowManager):
    """Keeps tables whose blocks are only where a later step reads."""

    def held(self, table: list[KVCacheBlock]) -> list[KVCacheBlock]:
        return [block for block in super().held(table) if block is not UNWRITTEN]

    def entries_for(self, table: list[KVCacheBlock], num_tokens: int) -> list[bool]:
        first, stop = len(table), self._group.num_blocks_for(num_tokens)
        read = set(range(self._group.first_block_seen(num_tokens), stop))
        if self._pool.enable_caching:
            begin = first * self.block_size // self._stride * self._stride
            for length in range(begin, num_tokens + 1, self._stride):
                seen = self._group.first_block_seen(length), length // self.block_size
                read.update(range(*seen))
        return [index in read for index in range(first, stop)]


def num_leading_nulls(table: list[KVCacheBlock]) -> int:
    """Returns how many entries of a table stand before its first block. They are many, and blocks
    are few."""
    first = len(table)
    while first > 0 and table[first - 1] is not NULL_BLOCK:
        first -= 1
    return first
