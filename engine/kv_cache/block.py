"""One block of the KV cache, and the queue of blocks that nothing uses.

Life of a block:
    1. free, empty: in the queue, `block_hash` None
    2. `BlockPool.get_new_blocks` takes it from the front: `ref_cnt` 1
    3. full and confirmed: it gets a `block_hash`, and other requests may find it (`ref_cnt` 2, …)
    4. the last user releases it: back in the queue, hash kept, so it can still be found (to 3)
    5. it reaches the front and is taken for something else: the hash goes (to 2)
"""

from __future__ import annotations

from collections.abc import Iterable


class KVCacheBlock:
    """Bookkeeping of one physical block. `block_id` is the same on every rank."""

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        cached = self.block_hash.hex()[:8] if self.block_hash is not None else None
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, block_hash={cached})"


class FreeKVCacheBlockQueue:
    """Doubly linked list through the blocks themselves.

        _head ⇄ next to be taken ⇄ … ⇄ freed last ⇄ _tail

    A cache hit takes a block out of the middle, which a deque can only do by searching. Links
    live in the blocks, so no operation allocates; `_head` and `_tail` hold no block, so none
    has a special case for an end.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self.num_free_blocks = 0
        for block in blocks:
            self.append(block)

    def popleft(self) -> KVCacheBlock:
        """Raises `IndexError` when the queue is empty."""
        block = self._head.next_free
        if block is None or block is self._tail:
            raise IndexError("no free block is left")
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Takes `block` from wherever it is. Raises `ValueError` when it is not in the queue."""
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise ValueError(f"{block} is not in the free queue")
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Adds the block at the end: it is taken last."""
        last = self._tail.prev_free
        assert last is not None
        self._insert(last, block, self._tail)

    def appendleft(self, block: KVCacheBlock) -> None:
        """Adds the block at the front: it is taken next."""
        first = self._head.next_free
        assert first is not None
        self._insert(self._head, block, first)

    def _insert(self, before: KVCacheBlock, block: KVCacheBlock, after: KVCacheBlock) -> None:
        if block.next_free is not None:
            raise ValueError(f"{block} is in the free queue already")
        block.prev_free, block.next_free = before, after
        before.next_free = after.prev_free = block
        self.num_free_blocks += 1

    def block_ids(self) -> list[int]:
        """Returns the ids in the order in which they would be taken."""
        ids = []
        block = self._head.next_free
        while block is not None and block is not self._tail:
            ids.append(block.block_id)
            block = block.next_free
        return ids
