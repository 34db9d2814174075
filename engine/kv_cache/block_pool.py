"""All blocks of one engine: who uses them, and which full ones can be found by content.

    1. `get_new_blocks`: from the front of the free queue; a cached one is forgotten only now
    2. `cache_full_blocks`: full, confirmed blocks can be found by their hash
    3. `get_cached_block`, `touch`: another request uses them as well
    4. `free_blocks`: one user less; without users back to the free queue, still to be found

Blocks without a hash go to the front of the queue: nothing can ever ask for them. Blocks with a
hash go to the end, a request's last block first, because a prefix is of use without its tail
but never the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.kv_cache.block import FreeKVCacheBlockQueue, KVCacheBlock
from engine.kv_cache.block_hash import BlockHash


class BlockHashToBlockMap:
    """Hash to the blocks that hold that content.

    Nearly always there is one, and it is stored without a container. Two requests that compute
    the same prefix side by side give two; only those get a dict (by block id).
    """

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, KVCacheBlock | dict[int, KVCacheBlock]] = {}

    def __len__(self) -> int:
        """Returns the number of different hashes."""
        return len(self._blocks)

    def get_one(self, block_hash: BlockHash) -> KVCacheBlock | None:
        found = self._blocks.get(block_hash)
        if isinstance(found, dict):
            return next(iter(found.values()))
        return found

    def insert(self, block_hash: BlockHash, block: KVCacheBlock) -> None:
        found = self._blocks.get(block_hash)
        if found is None:
            self._blocks[block_hash] = block
        elif isinstance(found, dict):
            found[block.block_id] = block
        else:
            self._blocks[block_hash] = {found.block_id: found, block.block_id: block}

    def remove(self, block_hash: BlockHash, block: KVCacheBlock) -> None:
        """Raises `KeyError` when `block` is not stored under `block_hash`."""
        found = self._blocks[block_hash]
        if isinstance(found, dict):
            del found[block.block_id]
            if len(found) == 1:
                self._blocks[block_hash] = next(iter(found.values()))
        elif found is block:
            del self._blocks[block_hash]
        else:
            raise KeyError(block.block_id)

    def clear(self) -> None:
        self._blocks.clear()


class BlockPool:
    """`num_blocks` blocks, all of them for requests."""

    def __init__(self, num_blocks: int, enable_caching: bool) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV cache needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_queue = FreeKVCacheBlockQueue(self.blocks)
        self._cached = BlockHashToBlockMap()
        self.on_cached: Callable[[KVCacheBlock], None] | None = None
        """Records each block that can be found from now on."""
        self.num_evicted = 0
        """Blocks that could be found and were taken for something else."""

    @property
    def num_free_blocks(self) -> int:
        """Returns the number of blocks that can be taken, cached content included."""
        return self.free_queue.num_free_blocks

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        """Takes `count` blocks, forgetting what they held.

        Raises:
            ValueError: There are not that many; ask `num_free_blocks` first.
        """
        if count > self.num_free_blocks:
            raise ValueError(f"{count} blocks wanted, {self.num_free_blocks} are free")
        return [self._take() for _ in range(count)]

    def _take(self) -> KVCacheBlock:
        block = self.free_queue.popleft()
        if block.block_hash is not None:
            self.num_evicted += 1
            self._forget(block, block.block_hash)
        block.ref_cnt = 1
        return block

    def _forget(self, block: KVCacheBlock, block_hash: BlockHash) -> None:
        self._cached.remove(block_hash, block)
        block.block_hash = None

    def get_cached_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """Returns any block with that content. Not yet a user of it: `touch` it before anything
        else.
        """
        return self._cached.get_one(block_hash)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Adds a user to each block; free ones leave the queue."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def cache_full_blocks(
        self, blocks: list[KVCacheBlock], hashes: list[BlockHash], *, tells: bool = True
    ) -> None:
        """Gives each `blocks[i]`, which is full and confirmed, the name `hashes[i]`. Not `tells`:
        `tell` records it later, if anything does."""
        if not self.enable_caching:
            return
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block.block_hash is None:
                block.block_hash = block_hash
                self._cached.insert(block_hash, block)
                if tells:
                    self.tell(block)

    def tell(self, block: KVCacheBlock) -> None:
        """Has a block recorded that can be found."""
        if self.on_cached is not None:
            self.on_cached(block)

    def yield_first(self, named: Iterable[tuple[KVCacheBlock, BlockHash | None]]) -> None:
        """Moves the free blocks that still have these names to the front: they are taken next."""
        for block, name in named:
            if block.ref_cnt == 0 and block.block_hash == name:
                self.free_queue.remove(block)
                self.free_queue.appendleft(block)

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Removes a user from each block, in the order in which they should be taken again.

        Raises:
            ValueError: A block has no user.
        """
        for block in blocks:
            if block.ref_cnt < 1:
                raise ValueError(f"{block} is freed but has no user")
            block.ref_cnt -= 1
            if block.ref_cnt > 0:
                continue
            if block.block_hash is None:
                self.free_queue.appendleft(block)
            else:
                self.free_queue.append(block)

    def reset_prefix_cache(self) -> bool:
        """Forgets all content. False, and nothing changed, while any block is in use."""
        if self.num_free_blocks != self.num_blocks:
            return False
        self._cached.clear()
        for block in self.blocks:
            block.block_hash = None
        return True
