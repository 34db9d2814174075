"""Blocks of a KV cache in host memory, as memory that sockets read from and write to."""

from __future__ import annotations

import ctypes

from kv_transfer.memory.cache_view import KVCacheView


class BlockViews:
    """Only where `cache.device.copies_at_once`. Views do not keep the cache mapped: they must be
    gone before it is closed."""

    def __init__(self, cache: KVCacheView) -> None:
        self._used_bytes = [page.num_bytes for page in cache.pages]
        self._page_bytes = cache.page_bytes
        self._cache = cache
        memory = (ctypes.c_char * cache.num_bytes).from_address(cache.address)
        self._memory = memoryview(memory).cast("B")

    def of(self, group: int, layer: int, block_ids: list[int]) -> list[memoryview]:
        """Returns what a layer of the group uses of these pages, in order. Neighbours come as one,
        unless something else lies between them."""
        size, used = self._page_bytes, self._used_bytes[group]
        base = self._cache.page_of(group, layer, 0) - self._cache.address
        views: list[memoryview] = []
        start = previous = block_ids[0]
        for block_id in block_ids[1:]:
            if block_id != previous + 1 or used < size:
                views.append(self._memory[base + start * size : base + previous * size + used])
                start = block_id
            previous = block_id
        views.append(self._memory[base + start * size : base + previous * size + used])
        return views
