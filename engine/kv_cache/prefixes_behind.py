"""Prefixes whose blocks lie behind the cache: in host memory, on disk, in a store, with a peer.

What must come for a prefix, in each group of layers:

    full      the blocks behind those that the cache has, from the first on
    window    of the blocks that the next token sees, those behind what the cache has of them
    state     the copy that was kept behind just these tokens, into the request's own block

1. `find`      how long is the longest prefix of which all groups have theirs?
2. `names`     which blocks are these?
3. `tables`    what the request begins with (`KVCacheManager.allocate_slots`)
4. `blocks`    which of its blocks must be filled

A peer gets `chains`, the hashes of the prompt's blocks, and does 1 and 2 itself (`names_seen`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import lcm

from engine.contracts.prefix_holder import HashChains
from engine.contracts.request import Request
from engine.kv_cache.block_hash import BlockHash, Named, extend_block_hashes
from engine.kv_cache.group_manager import BlockTables, GroupManager, IsBehind, RequestBlocks


class PrefixesBehind:
    """Reads `groups`, and the blocks of requests by id."""

    def __init__(
        self,
        groups: Sequence[GroupManager],
        blocks: Mapping[str, RequestBlocks],
        chain_sizes: Sequence[int],
    ) -> None:
        self._groups = groups
        self._by_need = sorted(groups, key=lambda group: not group.is_state)
        """A prefix without its state is of no use, whatever there is of its tokens."""
        self._blocks = blocks
        self.is_chain = len(groups) == 1 and groups[0].sees_all
        """A prefix is a chain of blocks, each of use with those before it."""
        self.chain_sizes = chain_sizes
        """The tokens of blocks whose hashes all names are made of."""
        self._unit = lcm(*self.chain_sizes)

    def last_end(self, num_tokens: int) -> int:
        """Returns the last place in `num_tokens` tokens where a prefix can end: blocks of all
        groups do, and states are kept."""
        return num_tokens // self._unit * self._unit

    def chains(self, request: Request, num_tokens: int) -> HashChains:
        """Returns the hashes of the full blocks among the first `num_tokens` tokens."""
        return {
            size: extend_block_hashes(request, size)[: num_tokens // size]
            for size in self.chain_sizes
        }

    def num_seen(self, num_tokens: int) -> int:
        """Returns how many blocks of a prefix the next token sees."""
        return sum(group.num_seen(num_tokens) for group in self._groups)

    def most_seen(self, num_blocks: int, num_tokens: int) -> int:
        """Returns the tokens of the longest prefix of at most `num_tokens` that has no more than
        `num_blocks` blocks which the next token sees."""
        ends = range(0, num_tokens + 1, self._unit)
        return ends[max(1, bisect_right(ends, num_blocks, key=self.num_seen)) - 1]

    def names_seen(self, prefix: Named, num_tokens: int) -> list[tuple[int, list[BlockHash]]]:
        """Returns for each group how many blocks no token behind a prefix sees, and the names of
        the others."""
        unseen = [group.num_unseen(num_tokens) for group in self._groups]
        return [
            (first, group.names_behind(prefix, first, num_tokens))
            for first, group in zip(unseen, self._groups, strict=True)
        ]

    def find(self, request: Named, max_tokens: int, is_behind: IsBehind) -> int:
        """Returns the tokens of the longest prefix of at most `max_tokens` of which each group has
        all that the next token sees, in the cache or behind it; a state only behind it."""
        num_tokens, index, num_agreed = max_tokens, 0, 0
        while num_tokens and num_agreed < len(self._groups):
            length = self._groups[index].find_behind(request, num_tokens, is_behind)
            num_agreed = num_agreed + 1 if length == num_tokens else 1
            num_tokens = length
            index = (index + 1) % len(self._groups)
        return num_tokens

    def names(self, request: Request, num_tokens: int) -> tuple[list[BlockHash], list[BlockHash]]:
        """Returns the names of what a prefix of `num_tokens` tokens has in the cache, and of what
        must come for it, the most needed first."""
        held, coming = list[BlockHash](), list[BlockHash]()
        for group in self._by_need:
            table = group.run_in_cache(request, num_tokens)
            held += [block.block_hash for block in group.held(table) if block.block_hash]
            coming += group.names_behind(request, len(table), num_tokens)
        return held, coming

    def wanted(self, request: Request, num_before: int, num_tokens: int) -> list[BlockHash]:
        """Returns the names of all blocks that may have to come for a prefix of more than
        `num_before` and at most `num_tokens` tokens, the most needed first."""
        groups = self._by_need
        return [
            name for one in groups for name in one.names_wanted(request, num_before, num_tokens)
        ]

    def tables(
        self,
        request: Request,
        cached: BlockTables,
        num_tokens: int,
        *,
        is_certain: bool,
        is_by_token: bool,
    ) -> BlockTables:
        """Returns the tables of a request that has `cached` and whose first `num_tokens` tokens
        come: what each group has of them, from the first block that is seen on without a gap. Not
        `is_certain`: fewer may come, whose next token sees earlier blocks of windows.
        `is_by_token`: all behind what is cached in every group is written, so that others may have
        no such block."""
        if self.is_chain:
            return cached
        if is_by_token:
            return [
                [] if group.is_state else table
                for group, table in zip(self._groups, cached, strict=True)
            ]
        return [
            table
            if group.has_window and not is_certain
            else group.run_in_cache(request, num_tokens)
            for group, table in zip(self._groups, cached, strict=True)
        ]

    def blocks(
        self, request: Request, num_before: int, num_tokens: int
    ) -> tuple[list[BlockHash], list[int]]:
        """Returns names and ids of the request's blocks that must be filled for its first
        `num_tokens` tokens, of which `num_before` have their KV."""
        own = self._blocks[request.request_id]
        names, ids = list[BlockHash](), list[int]()
        for group in self._by_need:
            first = group.first_to_fill(own, num_before, num_tokens)
            coming = group.names_behind(request, first, num_tokens)
            names += coming
            table = own.tables[group.index]
            ids += [block.block_id for block in table[first : first + len(coming)]]
        return names, ids

    def skip_to(self, blocks: RequestBlocks, num_tokens: int, *, is_by_token: bool) -> None:
        """Keeps from others what windows have before what the token behind `num_tokens` sees: it
        stays unwritten; `is_by_token`: also of the first block that is seen."""
        for group in self._groups:
            first = (group.first_whole_block if is_by_token else group.num_unseen)(num_tokens)
            published = blocks.num_published
            published[group.index] = max(published[group.index], first)
