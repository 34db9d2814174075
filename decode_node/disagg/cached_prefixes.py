"""Guesses which prefixes our engine still has in its KV cache.

The engine knows exactly, in another process. For the choice between prefill here and elsewhere a
guess at hand is better: this remembers the blocks of requests that ended here, as many as the
cache has, and forgets the least recently used ones. A wrong guess costs time, never correctness. Of
prompts with images, which have equal tokens for different images, it knows nothing.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import xxhash

from engine.kv_cache.block_hash import root_hash
from engine.request_spec import RequestSpec


class CachedPrefixes:
    """Remembers blocks by the hash of all tokens up to their end. With `capacity` 0 nothing is
    remembered."""

    def __init__(self, capacity: int, block_size: int) -> None:
        self._capacity = capacity
        self._block_size = block_size
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Forgets everything: the engine has."""
        self._blocks.clear()

    def add(self, token_ids: Sequence[int], spec: RequestSpec) -> None:
        """Remembers a request that has ended here: its prompt and its answer."""
        if not self._capacity or spec.images:
            return
        for block in self._hashes(token_ids, spec):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def num_cached_tokens(self, token_ids: Sequence[int], spec: RequestSpec) -> int:
        """Returns how many leading tokens need not be computed; the last one always is."""
        count = 0
        if self._blocks and not spec.images:
            for block in self._hashes(token_ids, spec):
                if block not in self._blocks:
                    break
                count += self._block_size
        return min(count, len(token_ids) - 1)

    def _hashes(self, token_ids: Sequence[int], spec: RequestSpec) -> Iterator[int]:
        """Yields one hash for each full block."""
        size = self._block_size
        running = xxhash.xxh3_64(root_hash(spec))
        for stop in range(size, len(token_ids) + 1, size):
            running.update(array("i", token_ids[stop - size : stop]))
            yield running.intdigest()
