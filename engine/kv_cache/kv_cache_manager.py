"""Manages the blocks that each request has in every group of layers.

One request's tokens and blocks:

    |<------------- computed ------------->|<------- to be computed ------->|
    |  get_computed_blocks |   external    |                                |
    |  (prefix cache here) | (from a peer) |   chunks, then one by one      |
    |<-- touched -------->|<---------------- newly allocated -------------->|
    [  block  ][  block  ][  block  ][  block  ][  block  ][  block  ]
    |<-------- cached (hash published) ------->|
              full and confirmed only

Every group of layers has such a table of its own, over blocks of one pool: a block belongs to one
group at a time, and a prefix counts as cached when every group can serve it. What a group does
with its table is its `GroupManager`'s matter; nothing else in the engine knows of windows.

`allocate_slots` covers tokens that are known or will exist; `confirm` follows behind it with what
is certain: the KV is written and no token in the block is a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy

from engine.config import EngineConfig
from engine.contracts.outputs import ResidencyStats
from engine.contracts.request import Request
from engine.kv_cache.block import KVCacheBlock
from engine.kv_cache.block_hash import BlockHash
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.capacity import num_entries
from engine.kv_cache.group_manager import BlockTables, RequestBlocks, StateGroupManager
from engine.kv_cache.groups import chain_sizes, create_group_managers, state_stride
from engine.kv_cache.kept_states import BlockCopy, KeptStates
from engine.kv_cache.prefixes_behind import PrefixesBehind
from engine.kv_cache.promised_blocks import GrownTables, PromisedBlocks
from engine.kv_cache.sampled_pool import SampledBlockPool
from kv_transfer.layout import STATE_SPAN, BlockIds, KVGroup, KVLayout, own_groups


class KVCacheManager:
    """Keeps the blocks of all requests, over one `BlockPool`."""

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[KVGroup],
        enable_caching: bool,
        residency_sample: float = 0.0,
        step_tokens: int = STATE_SPAN,
    ) -> None:
        """Makes an empty cache. `step_tokens`: of one request that a step computes at most."""
        self.block_pool = (
            SampledBlockPool(num_blocks, enable_caching, residency_sample)
            if residency_sample
            else BlockPool(num_blocks, enable_caching)
        )
        self._groups = create_group_managers(groups, self.block_pool, step_tokens)
        sizes = chain_sizes(groups)
        self._shapes = groups = own_groups(groups)
        self._promised = PromisedBlocks(self._groups, self.block_pool)
        rolling = {group.index for group in self._promised.windows}
        self._staying = [index for index in range(len(groups)) if index not in rolling]
        self.states = KeptStates(self._groups, self.block_pool, state_stride(groups))
        self._sizes = [(index, group.block_size) for index, group in enumerate(groups)]
        self._other_sizes = self._sizes[1:]
        self._blocks: dict[str, RequestBlocks] = {}
        self.behind = PrefixesBehind(self._groups, self._blocks, sizes)
        self.confirms_blocks = enable_caching or any(group.window is not None for group in groups)
        """`confirm` has something to do whenever a request has filled a block."""
        self.least_block_size = min(group.block_size for group in groups)

    @classmethod
    def of(cls, config: EngineConfig, num_blocks: int) -> KVCacheManager:
        """Returns the manager of an engine's cache of `num_blocks`."""
        cache, sample = config.cache, config.inspection.kv_cache_metrics_sample
        return cls(
            num_blocks,
            config.kv_layout.groups,
            cache.enable_prefix_caching,
            sample,
            config.scheduler.max_num_batched_tokens,
        )

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def num_blocks(self) -> int:
        return self.block_pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Returns the blocks that are neither used nor promised."""
        return self._promised.num_free

    def residency(self) -> ResidencyStats | None:
        """Returns how long blocks stay; None: nothing watches them."""
        pool = self.block_pool
        return deepcopy(pool.stats) if isinstance(pool, SampledBlockPool) else None

    def num_blocks_more(self, num_tokens: int) -> int:
        """Returns the blocks that `num_tokens` tokens more of running requests take: windows that
        roll give back as many as they take."""
        return sum(self._shapes[index].num_blocks_for(num_tokens) for index in self._staying)

    # A request gets blocks --------------------------------------------------------------------

    def get_computed_blocks(
        self, request: Request, max_tokens: int, *, is_pulled: bool = False
    ) -> tuple[BlockTables, int]:
        """Returns the longest cached prefix of at most `max_tokens` tokens, and its length.

        It ends where every group has full blocks. `max_tokens` is below the number of known
        tokens, because the next token can only come from computing one. The blocks belong to
        nothing yet: `allocate_slots` takes them. Nothing for a request that needs log
        probabilities of its prompt.

        Args:
            is_pulled: A peer sends the rest, and every state, wherever the prefix ends.
        """
        num_groups = len(self._groups)
        if not self.block_pool.enable_caching or request.needs_prompt_logprobs:
            return [[] for _ in range(num_groups)], 0
        num_tokens = max(0, max_tokens)
        found: list[list[KVCacheBlock] | None] = [None] * num_groups
        index = num_agreed = 0
        while num_agreed < num_groups:
            group = self._groups[index]
            if is_pulled and isinstance(group, StateGroupManager):
                table, length = list[KVCacheBlock](), num_tokens
            else:
                table, length = group.find_cached(request, num_tokens, found[index])
            found[index] = table
            num_agreed = num_agreed + 1 if length == num_tokens else 1
            num_tokens = length
            index = (index + 1) % num_groups
        return [table for table in found if table is not None], num_tokens

    def block_names(self, request: Request, max_tokens: int) -> list[BlockHash]:
        """Returns the names of the request's full blocks among its first `max_tokens` tokens; only
        where there is one group, of which every token sees all."""
        return self._groups[0].names(request, max_tokens)

    def without_unseen(self, computed: BlockTables, num_tokens: int) -> BlockTables:
        """Returns the tables of a request whose first `num_tokens` tokens come from elsewhere:
        what no later token sees takes no block."""
        return [
            group.without_unseen(table, num_tokens)
            for group, table in zip(self._groups, computed, strict=True)
        ]

    def can_allocate(self, num_tokens: int, computed: BlockTables, headroom: int = 0) -> bool:
        """Returns whether a new request fits and `headroom` blocks stay free."""
        num_wanted = headroom
        for group, table in zip(self._groups, computed, strict=True):
            num_wanted += group.num_wanted(num_tokens, table)
        return num_wanted <= self.num_free_blocks

    def allocate_slots(
        self,
        request: Request,
        num_tokens: int,
        computed: BlockTables | None = None,
        num_received: int = 0,
        num_filled: int = 0,
    ) -> RequestBlocks | None:
        """Gives a request that has no blocks those for its first `num_tokens` tokens. Where states
        were found, `states.copies_of` it must be made before it computes anything. Windows that
        roll get those that are filled from elsewhere, and the others by `extend`.

        Args:
            num_received: Tokens whose KV a peer sends, as far as the next one sees it.
            num_filled: Tokens whose KV comes from elsewhere before anything is computed.

        Returns:
            Its blocks, or None when there are not enough free ones; then nothing changed.
        """
        tables = computed if computed is not None else [[] for _ in self._groups]
        if not self.can_allocate(num_tokens, tables):
            return None
        # Of all groups, before any block is taken: what is found must not be taken.
        for group, table in zip(self._groups, tables, strict=True):
            self.block_pool.touch(group.held(table))
        begun = [group.begin(table) for group, table in zip(self._groups, tables, strict=True)]
        blocks = self._blocks[request.request_id] = RequestBlocks(
            [own for own, _ in begun],
            [
                max(len(table), group.first_whole_block(num_received))
                for group, table in zip(self._groups, tables, strict=True)
            ],
            [block for _, borrowed in begun for block in borrowed],
        )
        if not self._promised.windows:
            grown = self.grow(blocks, num_tokens)
            assert grown is not None
            return blocks
        grown = self._grow_groups(blocks.tables, num_tokens, self._staying)
        rolled = self._promised.roll_on(blocks.tables, num_filled)
        assert grown is not None and rolled is not None
        blocks.num_prompt_tokens = num_tokens
        self._promised.settle(blocks)
        return blocks

    def extend(self, blocks: RequestBlocks, num_tokens: int) -> GrownTables | None:
        """Does what `grow` does for windows that roll, before a step computes the prompt up to
        `num_tokens` tokens. What the request was promised is there."""
        return self._promised.extend(blocks, num_tokens)

    def fits_into_blocks(self, peer: KVLayout) -> bool:
        """Returns whether whole blocks of a peer fill whole blocks here, in every group."""
        pairs = zip(self._shapes, peer.groups, strict=False)
        return all(theirs.block_size % ours.block_size == 0 for ours, theirs in pairs)

    def skip_to(self, request: Request, num_tokens: int, *, is_by_token: bool) -> bool:
        """Makes room for the first `num_tokens` tokens, whose KV comes from elsewhere, as far as
        the next one sees it: in whole blocks, or `is_by_token`. Windows have it from there on, and
        publish nothing before. Returns False where blocks are lacking: it must begin anew."""
        blocks = self._blocks[request.request_id]
        self.behind.skip_to(blocks, num_tokens, is_by_token=is_by_token)
        return self._promised.skip_to(blocks, num_tokens)

    def can_fork(self, pairs: Sequence[tuple[Request, Request]], headroom: int) -> bool:
        """Returns whether `fork` has blocks for all these, and `headroom` stay free: pairs of a
        prompt and a request."""
        num_wanted = headroom
        for prompt, request in pairs:
            num_shared = (prompt.num_prompt_tokens // group.block_size for group in self._shapes)
            num_wanted += num_entries(self._shapes, request.num_tokens) - sum(num_shared)
        return num_wanted <= self.num_free_blocks

    def fork(
        self, prompt: Request, request: Request, headroom: int = 0, *, takes_all: bool = False
    ) -> list[BlockCopy] | None:
        """Gives `request`, which has no blocks and whose tokens begin with `prompt`'s, the KV of
        the whole prompt, and blocks for all its tokens.

        Full blocks get one user more. The last partial one must be copied, before the request
        computes anything.

        Args:
            headroom: Blocks that must stay free.
            takes_all: The request takes over the prompt's blocks, and none is copied.

        Returns:
            The copies, or None when there are not enough free blocks; then nothing changed.
        """
        source = self._blocks[prompt.request_id]
        num_tokens = prompt.num_prompt_tokens
        stops = [
            group.num_blocks_for(num_tokens) if takes_all else num_tokens // group.block_size
            for group in self._shapes
        ]
        num_wanted = num_entries(self._shapes, request.num_tokens) - sum(stops)
        if num_wanted + headroom > self.num_free_blocks:
            return None
        tables = [table[:stop] for table, stop in zip(source.tables, stops, strict=True)]
        if takes_all:
            del self._blocks[prompt.request_id]
        else:
            for manager, table in zip(self._groups, tables, strict=True):
                self.block_pool.touch(manager.held(table))
        blocks = RequestBlocks(tables, list(source.num_published))
        self._blocks[request.request_id] = blocks
        self.grow(blocks, request.num_tokens)
        return [
            (old[stop].block_id, new[stop].block_id)
            for old, new, stop in zip(source.tables, blocks.tables, stops, strict=True)
            if stop < len(old)
        ]

    def adopt(self, request: Request, source: Request, num_tokens: int) -> list[KVCacheBlock]:
        """Lets a request go on behind the first `num_tokens` tokens of `source`, which have KV: it
        gets a user's share of all full blocks among them, and keeps those behind for itself.

        Returns:
            The blocks that it has no more; the caller owes them a `free_blocks`.
        """
        own, other = self._blocks[request.request_id], self._blocks[source.request_id]
        lost: list[KVCacheBlock] = []
        for group, table, shared in zip(self._groups, own.tables, other.tables, strict=True):
            stop = num_tokens // group.block_size
            pairs = zip(table[:stop], shared, strict=False)
            start = next((i for i, (mine, its) in enumerate(pairs) if mine is not its), stop)
            self.block_pool.touch(group.held(shared[start:stop]))
            lost += group.held(table[start:stop])
            table[start:stop] = shared[start:stop]
        own.num_published = list(other.num_published)
        request.block_hashes = {size: list(names) for size, names in source.block_hashes.items()}
        return lost

    def grow(self, blocks: RequestBlocks, num_tokens: int) -> GrownTables | None:
        """Gives a request the blocks for its first `num_tokens` tokens that it has not yet.

        Returns:
            (group, ids of new blocks) of each group that needed some, or None when there are not
            enough free ones; then nothing changed.
        """
        tables = blocks.tables
        if len(tables) > 1:
            return self._grow_groups(tables, num_tokens, range(len(tables)))
        table = tables[0]
        count = -(-num_tokens // self.least_block_size) - len(table)
        if count <= 0:
            return []
        if count > self.block_pool.free_queue.num_free_blocks:
            return None
        new_blocks = self.block_pool.get_new_blocks(count)
        table += new_blocks
        return [(0, [block.block_id for block in new_blocks])]

    def _grow_groups(
        self, tables: BlockTables, num_tokens: int, groups: Sequence[int]
    ) -> GrownTables | None:
        missing = [
            max(0, self._shapes[index].num_blocks_for(num_tokens) - len(tables[index]))
            for index in groups
        ]
        if sum(missing) > self.num_free_blocks:
            return None
        grown: GrownTables = []
        for index, count in zip(groups, missing, strict=True):
            if count > 0:
                new_blocks = self.block_pool.get_new_blocks(count)
                tables[index] += new_blocks
                grown.append((index, [block.block_id for block in new_blocks]))
        return grown

    # What a request has -----------------------------------------------------------------------

    def get_blocks(self, request_id: str) -> RequestBlocks:
        """Returns the request's own, which grow in place."""
        return self._blocks[request_id]

    def get_block_ids(self, request_id: str) -> BlockIds:
        """Returns the blocks of each group with blocks of its own, by logical block. Entries before
        a window name any block."""
        tables = self._blocks[request_id].tables
        return tuple([block.block_id for block in table] for table in tables)

    def capacity(self, blocks: RequestBlocks) -> int:
        """Returns the tokens that the request's blocks hold in every group."""
        tables = blocks.tables
        index, block_size = self._sizes[0]
        least = len(tables[index]) * block_size
        for index, block_size in self._other_sizes:
            least = min(least, len(tables[index]) * block_size)
        return least

    def can_continue(self, num_tokens: int, num_received: int) -> bool:
        """Returns whether token `num_tokens` can be computed behind KV that a peer has sent for
        token `num_received`: windows begin earlier for earlier tokens."""
        return all(group.can_continue(num_tokens, num_received) for group in self._groups)

    def confirm(self, request: Request, num_tokens: int) -> None:
        """Records that the KV of the first `num_tokens` tokens exists, all of them are confirmed,
        and every step that has computed them has retired.

        Others may find the full blocks among them, and blocks that no later token sees are free.
        """
        blocks = self._blocks[request.request_id]
        for group in self._groups:
            group.confirm(request, blocks, num_tokens)
        if blocks.borrowed or blocks.kept:
            self.states.settle(request, blocks, num_tokens)
        if self._promised.windows:
            self._promised.settle(blocks)

    # It leaves --------------------------------------------------------------------------------

    def take_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """Takes the blocks from the request; the caller owes them a `free_blocks`."""
        blocks = self._blocks.pop(request_id, None)
        if blocks is None:
            return []
        self._promised.count -= blocks.num_promised
        self.states.leave(blocks)
        return self._held(blocks)

    def free_blocks(self, blocks: list[KVCacheBlock]) -> None:
        """Frees `blocks`, given in the order of the tokens; the tail is the first to be taken
        again.
        """
        self.block_pool.free_blocks(reversed(blocks))

    def free(self, request: Request) -> None:
        """Frees everything that the request has, at once."""
        self.free_blocks(self.take_blocks(request.request_id))

    def reset_prefix_cache(self) -> bool:
        return self.block_pool.reset_prefix_cache()

    def request_ids(self) -> Iterable[str]:
        """Returns the requests that have blocks."""
        return list(self._blocks)

    def held_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """Returns the request's blocks of all groups, each once."""
        return self._held(self._blocks[request_id])

    def _held(self, blocks: RequestBlocks) -> list[KVCacheBlock]:
        held: list[KVCacheBlock] = []
        for group, table in zip(self._groups, blocks.tables, strict=True):
            held += group.held(table)
        held += blocks.borrowed
        held += [block for _, block in blocks.kept]
        return held
