"""Blocks of a KV cache in host memory, as memory that sockets read from and write to."""

from __future__ import annotations

import ctypes

from kv_transfer.memory.cache_view import KVCacheView


class BlockViews:
    """Only where `cache.device.copies_at_once`. Views do not keep the cache mapped: they must be
    gone before it is closed."""

    def __init__(self, cache: KVCacheView, num_layers: int) -> None:
        self._block_bytes = cache.shape.num_bytes
        self._layer_bytes = cache.num_blocks * self._block_bytes
        memory = (ctypes.c_char * (num_layers * self._layer_bytes)).from_address(
            cache.address_of(0, 0)
        )
        self._memory = memoryview(memory).cast("B")

    def of(self, layer: int, block_ids: list[int]) -> list[memoryview]:
        """In order, neighbours as one."""
        size, base = self._block_bytes, layer * self._layer_bytes
        views: list[memoryview] = []
        start = previous = block_ids[0]
        for block_id in block_ids[1:]:
            if block_id != previous + 1:
                views.append(self._memory[base + start * size : base + (previous + 1) * size])
                start = block_id
            previous = block_id
        views.append(self._memory[base + start * size : base + (previous + 1) * size])
        return views
