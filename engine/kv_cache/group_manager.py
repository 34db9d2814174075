"""Manages one KV group's part of a request's blocks.

A request has one table a group; entry i is the block of the tokens from `i * block_size` on.

    full      [ b0 ][ b1 ][ b2 ][ b3 ]     every token sees all before it: all blocks stay
    window    [null][null][ b2 ][ b3 ]     blocks that no later token sees are given back
    state     [            b0            ]     one block, written in place by every step; copies
                                               of it, behind full blocks of the others, may be found

Tables keep their length, so a logical block has the same index for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from engine.contracts.request import Request
from engine.kv_cache.block import KVCacheBlock
from engine.kv_cache.block_hash import BlockHash, Named, extend_block_hashes
from engine.kv_cache.block_pool import BlockPool
from kv_transfer.layout import KVGroup

BlockTables: TypeAlias = list[list[KVCacheBlock]]
"""One table a group, by logical block."""

IsBehind: TypeAlias = Callable[[BlockHash], bool]
"""Says whether a block lies behind the cache: in host memory, on disk, in a store."""

_DIGEST_BYTES = 15

NULL_BLOCK = KVCacheBlock(0)
"""Stands where a table has no block any more. Nothing reads there; its id is that of a block that
exists, so that the entry is harmless wherever tables are copied as a whole. It is neither free
nor without a hash, so nothing takes or publishes it."""
NULL_BLOCK.ref_cnt = 1
NULL_BLOCK.block_hash = b""


@dataclass(slots=True)
class RequestBlocks:
    """Holds the blocks of one request, which grow in place.

    Attributes:
        num_published: By group, leading entries of its table that others can find, or never will.
        borrowed: Kept states that the request begins with copies of, until those are made.
        kept: Copies of its states that nothing can find yet, with the groups that they are of.
        num_kept_tokens: The tokens behind which they were copied.
        passing: The last copies behind its answer that others find, with their names.
        num_prompt_tokens: Those that are promised blocks of windows that roll.
        num_promised: These blocks.
    """

    tables: BlockTables
    num_published: list[int]
    borrowed: list[KVCacheBlock] = field(default_factory=list)
    kept: list[tuple[int, KVCacheBlock]] = field(default_factory=list)
    num_kept_tokens: int = 0
    passing: list[tuple[KVCacheBlock, BlockHash | None]] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_promised: int = 0

    @property
    def check_len(self) -> int:
        """Returns how many tokens a row has when the step is done that copies what is kept."""
        return self.num_kept_tokens + 2


class GroupManager:
    """Keeps tables of a group whose tokens see all before them."""

    def __init__(self, index: int, group: KVGroup, pool: BlockPool) -> None:
        self.index = index
        self.block_size = group.block_size
        self.is_state = group.is_state
        self.sees_all = not group.is_state and group.window is None
        self.has_window = group.window is not None
        self._group = group
        self._pool = pool
        kept_as = f"{group.dtype}:{group.scales}".encode() if group.scales else b""
        self._tag = (bytes([index]) if index else b"") + _digest(kept_as)
        """Behind a block's hash: groups share the chain of hashes, and never a block. Nor do caches
        of other dtypes or scales, as blocks outlive their node on disk."""

    def find_cached(
        self, request: Request, num_tokens: int, known: list[KVCacheBlock] | None
    ) -> tuple[list[KVCacheBlock], int]:
        """Returns the table of the longest prefix of at most `num_tokens` tokens that is cached,
        and its tokens.

        Args:
            known: The table for a larger `num_tokens`; None for the first call.
        """
        stop = num_tokens // self.block_size
        if known is not None:
            return known[:stop], min(stop, len(known)) * self.block_size
        found = self.run_in_cache(request, num_tokens)
        return found, len(found) * self.block_size

    def names(self, request: Named, num_tokens: int) -> list[BlockHash]:
        """Returns the names of the full blocks among the first `num_tokens` tokens."""
        return [block_hash + self._tag for block_hash in self._hashes(request, num_tokens)]

    def run_in_cache(self, request: Named, num_tokens: int) -> list[KVCacheBlock]:
        """Returns the table of a request whose first `num_tokens` tokens come from behind the
        cache: what the cache has of them, from the first block that is seen on without a gap."""
        return self._run(self._hashes(request, num_tokens))

    def find_behind(self, request: Named, num_tokens: int, is_behind: IsBehind) -> int:
        """Returns the tokens of the longest prefix of at most `num_tokens` of which `run_in_cache`
        has a beginning, and all the rest lies behind the cache."""
        hashes = self._hashes(request, num_tokens)
        stop = len(self._run(hashes))
        while stop < len(hashes) and is_behind(hashes[stop] + self._tag):
            stop += 1
        return stop * self.block_size

    def names_behind(self, request: Named, first: int, num_tokens: int) -> list[BlockHash]:
        """Returns the names of the blocks from the `first` on that must come for a prefix of
        `num_tokens` tokens."""
        return self.names(request, num_tokens)[first:]

    def names_wanted(self, request: Request, num_before: int, num_tokens: int) -> list[BlockHash]:
        """Returns the names of all blocks that may be needed for prefixes of more than `num_before`
        and at most `num_tokens` tokens."""
        return self.names(request, num_tokens)[num_before // self.block_size :]

    def first_to_fill(self, blocks: RequestBlocks, num_before: int, num_tokens: int) -> int:
        """Returns the first block that must be filled for the first `num_tokens` tokens of a
        request that began with `run_in_cache`, and has the KV of the first `num_before`."""
        return max(blocks.num_published[self.index], num_before // self.block_size)

    def num_unseen(self, num_tokens: int) -> int:
        """Returns how many leading blocks no token from `num_tokens` on sees."""
        return 0

    def num_seen(self, num_tokens: int) -> int:
        """Returns how many blocks of `num_tokens` tokens, which fill theirs, the next one sees."""
        return self._group.num_blocks_for(num_tokens) - self._group.first_block_seen(num_tokens)

    def _hashes(self, request: Named, num_tokens: int) -> list[BlockHash]:
        return extend_block_hashes(request, self.block_size)[: num_tokens // self.block_size]

    def _run(self, hashes: list[BlockHash]) -> list[KVCacheBlock]:
        found: list[KVCacheBlock] = []
        for block_hash in hashes:
            if (block := self._pool.get_cached_block(block_hash + self._tag)) is None:
                break
            found.append(block)
        return found

    def num_at_hand(self, found: list[KVCacheBlock]) -> int:
        """Returns how many blocks fewer a request takes from the free ones with what was found. A
        cached block without a user counts as free, but is about to be used."""
        return sum(block.ref_cnt > 0 for block in found)

    def num_wanted(self, num_tokens: int, found: list[KVCacheBlock]) -> int:
        """Returns how many free blocks a request of `num_tokens` tokens takes at once with what was
        found."""
        return self._group.num_blocks_for(num_tokens) - self.num_at_hand(found)

    def begin(self, found: list[KVCacheBlock]) -> tuple[list[KVCacheBlock], list[KVCacheBlock]]:
        """Returns the table that a request begins with, and what it has to copy first."""
        return list(found), []

    def held(self, table: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Returns the blocks that `table` really has."""
        return table

    def without_unseen(self, table: list[KVCacheBlock], num_tokens: int) -> list[KVCacheBlock]:
        """Returns the table of a request whose first `num_tokens` tokens will not be computed
        here: entries that no later token sees hold no block."""
        return table

    def can_continue(self, num_tokens: int, num_received: int) -> bool:
        """Returns whether token `num_tokens` sees nothing but what a peer has sent for token
        `num_received`."""
        return True

    def first_whole_block(self, num_received: int) -> int:
        """Returns the first block of which a peer that sends this many tokens sends all."""
        return 0

    def confirm(self, request: Request, blocks: RequestBlocks, num_tokens: int) -> None:
        """Lets others find full blocks: the KV of the first `num_tokens` tokens is certain."""
        start, stop = blocks.num_published[self.index], num_tokens // self.block_size
        if start >= stop or not self._pool.enable_caching:
            return
        blocks.num_published[self.index] = stop
        hashes = extend_block_hashes(request, self.block_size)[start:stop]
        if self._tag:
            hashes = [block_hash + self._tag for block_hash in hashes]
        self._pool.cache_full_blocks(blocks.tables[self.index][start:stop], hashes)


class WindowGroupManager(GroupManager):
    """Keeps tables of a group whose tokens see themselves and the `window - 1` before them."""

    def find_cached(
        self, request: Request, num_tokens: int, known: list[KVCacheBlock] | None
    ) -> tuple[list[KVCacheBlock], int]:
        """Finds the cached blocks that the next token sees: the search goes from the end to the
        beginning, and a gap ends the hits behind it.
        """
        hashes = extend_block_hashes(request, self.block_size)
        stop = min(num_tokens // self.block_size, len(hashes))
        index, found = stop, list[KVCacheBlock]()
        while index > 0 and index > self._group.first_block_seen(stop * self.block_size):
            index -= 1
            block = self._pool.get_cached_block(hashes[index] + self._tag)
            if block is None:
                stop, found = index, []
            else:
                found.append(block)
        table = [NULL_BLOCK] * index + found[::-1] if stop else []
        return table, len(table) * self.block_size

    def run_in_cache(self, request: Named, num_tokens: int) -> list[KVCacheBlock]:
        first = self._group.first_block_seen(num_tokens)
        return [NULL_BLOCK] * first + self._run(self._hashes(request, num_tokens)[first:])

    def find_behind(self, request: Named, num_tokens: int, is_behind: IsBehind) -> int:
        hashes = self._hashes(request, num_tokens)
        stop = len(hashes)
        while stop > 0:
            first = self._group.first_block_seen(stop * self.block_size)
            index = first + len(self._run(hashes[first:stop]))
            while index < stop and is_behind(hashes[index] + self._tag):
                index += 1
            if index == stop:
                break
            stop = index  # All that end behind the gap see it, or end at it.
        return stop * self.block_size

    def names_wanted(self, request: Request, num_before: int, num_tokens: int) -> list[BlockHash]:
        return self.names(request, num_tokens)[self._group.first_block_seen(num_before) :]

    def num_unseen(self, num_tokens: int) -> int:
        return self._group.first_block_seen(num_tokens)

    def first_to_fill(self, blocks: RequestBlocks, num_before: int, num_tokens: int) -> int:
        first = self._group.first_block_seen(num_tokens)
        return max(first, super().first_to_fill(blocks, num_before, num_tokens))

    def held(self, table: list[KVCacheBlock]) -> list[KVCacheBlock]:
        return [block for block in table if block is not NULL_BLOCK]

    def without_unseen(self, table: list[KVCacheBlock], num_tokens: int) -> list[KVCacheBlock]:
        first = self._group.first_block_seen(num_tokens)
        return [NULL_BLOCK] * first + table[first:]

    def can_continue(self, num_tokens: int, num_received: int) -> bool:
        return self._group.first_token_seen(num_tokens) >= self._group.first_token_seen(
            num_received
        )

    def first_whole_block(self, num_received: int) -> int:
        return -(-self._group.first_token_seen(num_received) // self.block_size)

    def confirm(self, request: Request, blocks: RequestBlocks, num_tokens: int) -> None:
        """Confirms the first tokens and frees the blocks that no token from `num_tokens` on sees.
        Steps that are still out compute those tokens or later ones, so they do not read them
        either.
        """
        super().confirm(request, blocks, num_tokens)
        self._free_unseen(blocks, num_tokens)

    def _free_unseen(self, blocks: RequestBlocks, num_tokens: int) -> None:
        table = blocks.tables[self.index]
        start = stop = min(self._group.first_block_seen(num_tokens), len(table))
        while start > 0 and table[start - 1] is not NULL_BLOCK:
            start -= 1
        if start < stop:
            self._pool.free_blocks(reversed(self.held(table[start:stop])))
            table[start:stop] = [NULL_BLOCK] * (stop - start)


class StateGroupManager(GroupManager):
    """Keeps the block of a state, which is right for one token only: the next one. A block comes as
    it was left, because the computation of a sequence's first tokens begins with zeros.

    A prefix is cached where a copy of its state was kept; a request that finds one begins with a
    copy of that.

    Args:
        stride: States are kept behind multiples of this many tokens.
    """

    def __init__(self, index: int, group: KVGroup, pool: BlockPool, stride: int) -> None:
        super().__init__(index, group, pool)
        self._stride = stride

    def find_cached(
        self, request: Request, num_tokens: int, known: list[KVCacheBlock] | None
    ) -> tuple[list[KVCacheBlock], int]:
        hashes = extend_block_hashes(request, self._stride)
        for count in range(min(num_tokens // self._stride, len(hashes)), 0, -1):
            block = self._pool.get_cached_block(hashes[count - 1] + self._tag)
            if block is not None:
                return [block], count * self._stride
        return [], 0

    def run_in_cache(self, request: Named, num_tokens: int) -> list[KVCacheBlock]:
        """Returns nothing: the state comes into the request's own block, where it is continued."""
        return []

    def find_behind(self, request: Named, num_tokens: int, is_behind: IsBehind) -> int:
        for count in range(num_tokens // self._stride, 0, -1):
            if is_behind(self._name(request, count * self._stride)):
                return count * self._stride
        return 0

    def names_wanted(self, request: Request, num_before: int, num_tokens: int) -> list[BlockHash]:
        places = range(num_before // self._stride + 1, num_tokens // self._stride + 1)
        return [self._name(request, place * self._stride) for place in places]

    def first_to_fill(self, blocks: RequestBlocks, num_before: int, num_tokens: int) -> int:
        return 0

    def names_behind(self, request: Named, first: int, num_tokens: int) -> list[BlockHash]:
        return [self._name(request, num_tokens)]

    def num_at_hand(self, found: list[KVCacheBlock]) -> int:
        return -sum(block.ref_cnt == 0 for block in found)

    def begin(self, found: list[KVCacheBlock]) -> tuple[list[KVCacheBlock], list[KVCacheBlock]]:
        return [], found

    def without_unseen(self, table: list[KVCacheBlock], num_tokens: int) -> list[KVCacheBlock]:
        return []

    def is_kept(self, request: Request, num_tokens: int) -> bool:
        """Returns whether a state behind this many tokens can be found already; not where steps
        that are out have yet to say which tokens these are."""
        is_known = num_tokens <= request.num_tokens
        return is_known and (
            self._pool.get_cached_block(self._name(request, num_tokens)) is not None
        )

    def publish(
        self, request: Request, block: KVCacheBlock, num_tokens: int, is_passing: bool
    ) -> None:
        """Lets others find a copy of the request's state behind its first `num_tokens` tokens.
        `is_passing`: a later one may follow, so it does not go to host memory yet."""
        self._pool.cache_full_blocks(
            [block], [self._name(request, num_tokens)], tells=not is_passing
        )

    def _name(self, request: Named, num_tokens: int) -> bytes:
        hashes = extend_block_hashes(request, self._stride)
        return hashes[num_tokens // self._stride - 1] + self._tag

    def can_continue(self, num_tokens: int, num_received: int) -> bool:
        return num_tokens == num_received


def _digest(text: bytes) -> bytes:
    """Returns what stands for `text` in names, whose length is limited; nothing for nothing."""
    return hashlib.sha256(text).digest()[:_DIGEST_BYTES] if text else b""
