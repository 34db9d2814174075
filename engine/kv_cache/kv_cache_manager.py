"""Which blocks each request has.

One request's tokens and blocks:

    |<------------- computed ------------->|<------- to be computed ------->|
    |  get_computed_blocks |   external    |                                |
    |  (prefix cache here) | (from a peer) |   chunks, then one by one      |
    |<-- touched -------->|<---------------- newly allocated -------------->|
    [  block  ][  block  ][  block  ][  block  ][  block  ][  block  ]
    |<-------- cached (hash published) ------->|
              full and confirmed only

`allocate_slots` covers tokens that are known or will exist; `cache_blocks` follows behind it with
what is certain: the KV is written and no token in the block is a guess.
"""

from __future__ import annotations

from engine.kv_cache.block import KVCacheBlock
from engine.kv_cache.block_hash import extend_block_hashes
from engine.kv_cache.block_pool import BlockPool
from engine.request import Request


class KVCacheManager:
    """Blocks by request id, over one `BlockPool`."""

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool) -> None:
        self.block_size = block_size
        self.block_pool = BlockPool(num_blocks, enable_caching)
        self._req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        self._num_cached_blocks: dict[str, int] = {}

    @property
    def num_blocks(self) -> int:
        return self.block_pool.num_blocks

    @property
    def enable_caching(self) -> bool:
        return self.block_pool.enable_caching

    @property
    def num_free_blocks(self) -> int:
        return self.block_pool.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(
        self, request: Request, max_tokens: int
    ) -> tuple[list[KVCacheBlock], int]:
        """The longest cached prefix, in whole blocks, of at most `max_tokens` tokens.

        `max_tokens` is below the number of known tokens, because the next token can only come
        from computing one. The blocks belong to nobody yet: `allocate_slots` takes them. Nothing
        for a request that needs log probabilities of its prompt.
        """
        if not self.block_pool.enable_caching or request.needs_prompt_logprobs:
            return [], 0
        extend_block_hashes(request, self.block_size)
        blocks: list[KVCacheBlock] = []
        for block_hash in request.block_hashes[: max(0, max_tokens) // self.block_size]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks, len(blocks) * self.block_size

    def can_allocate(
        self, num_tokens: int, computed_blocks: list[KVCacheBlock], headroom: int = 0
    ) -> bool:
        """Whether a new request fits and `headroom` blocks stay free."""
        num_new = self.num_blocks_for(num_tokens) - len(computed_blocks)
        # A cached block without a user counts as free, but is about to be used.
        num_woken = sum(block.ref_cnt == 0 for block in computed_blocks)
        return num_new + num_woken + headroom <= self.num_free_blocks

    def allocate_slots(
        self,
        request: Request,
        num_tokens: int,
        computed_blocks: list[KVCacheBlock] | None = None,
    ) -> list[KVCacheBlock] | None:
        """Gives the request blocks for its first `num_tokens` tokens, those it has included.

        Returns:
            The blocks that are new (without `computed_blocks`), or None when there are not enough
            free ones; then nothing changed.
        """
        blocks = self._req_to_blocks.get(request.request_id)
        if blocks is None:
            computed = computed_blocks or []
            if not self.can_allocate(num_tokens, computed):
                return None
            self.block_pool.touch(computed)
            blocks = self._req_to_blocks[request.request_id] = list(computed)
            self._num_cached_blocks[request.request_id] = len(computed)
        num_new = self.num_blocks_for(num_tokens) - len(blocks)
        if num_new <= 0:
            return []
        if num_new > self.num_free_blocks:
            return None
        new_blocks = self.block_pool.get_new_blocks(num_new)
        blocks += new_blocks
        return new_blocks

    def get_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """The request's block table. It grows in place."""
        return self._req_to_blocks[request_id]

    def get_block_ids(self, request_id: str) -> list[int]:
        return [block.block_id for block in self._req_to_blocks[request_id]]

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """The KV of the first `num_computed_tokens` tokens exists, and all of them are confirmed:
        publishes the full blocks among them."""
        if not self.block_pool.enable_caching:
            return
        start = self._num_cached_blocks[request.request_id]
        stop = num_computed_tokens // self.block_size
        if stop <= start:
            return
        extend_block_hashes(request, self.block_size)
        blocks = self._req_to_blocks[request.request_id]
        self.block_pool.cache_full_blocks(blocks[start:stop], request.block_hashes[start:stop])
        self._num_cached_blocks[request.request_id] = stop

    def take_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """The request has no blocks any more; the caller owes them a `free_blocks`."""
        self._num_cached_blocks.pop(request_id, None)
        return self._req_to_blocks.pop(request_id, [])

    def free_blocks(self, blocks: list[KVCacheBlock]) -> None:
        """`blocks` in the order of the tokens; the tail is the first to be taken again."""
        self.block_pool.free_blocks(reversed(blocks))

    def free(self, request: Request) -> None:
        """Everything that the request has, at once."""
        self.free_blocks(self.take_blocks(request.request_id))

    def reset_prefix_cache(self) -> bool:
        return self.block_pool.reset_prefix_cache()

    def request_ids(self) -> list[str]:
        """Requests that have blocks."""
        return list(self._req_to_blocks)
