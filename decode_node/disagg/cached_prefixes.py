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

from engine.contracts.request_spec import RequestSpec
from engine.kv_cache.block_hash import root_hash


class CachedPrefixes:
    """Remembers blocks by the hash of all tokens up to their end, `capacity` of them in each of
    `num_groups` data-parallel groups. With `capacity` 0 nothing is remembered."""

    def __init__(self, capacity: int, block_size: int, num_groups: int = 1) -> None:
        self._capacity = capacity
        self._block_size = block_size
        self._groups = [OrderedDict[int, None]() for _ in range(num_groups)]

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    def clear(self) -> None:
        """Forgets everything: the engine has."""
        for blocks in self._groups:
            blocks.clear()

    def add(self, token_ids: Sequence[int], spec: RequestSpec, group: int = 0) -> None:
        """Remembers a request that has ended here: its prompt and its answer."""
        if not self._capacity or spec.images:
            return
        blocks = self._groups[group]
        for block in self._hashes(token_ids, spec):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)

    def num_cached_tokens(self, token_ids: Sequence[int], spec: RequestSpec) -> list[int]:
        """Returns how many leading tokens each group need not compute; the last one always is."""
        counts = [0] * len(self._groups)
        if len(self) and not spec.images:
            going_on = list(enumerate(self._groups))
            for block in self._hashes(token_ids, spec):
                going_on = [(group, blocks) for group, blocks in going_on if block in blocks]
                if not going_on:
                    break
                for group, _ in going_on:
                    counts[group] += self._block_size
        return [min(count, len(token_ids) - 1) for count in counts]

    def _hashes(self, token_ids: Sequence[int], spec: RequestSpec) -> Iterator[int]:
        """Yields one hash for each full block."""
        size = self._block_size
        running = xxhash.xxh3_64(root_hash(spec))
        for stop in range(size, len(token_ids) + 1, size):
            running.update(array("i", token_ids[stop - size : stop]))
            yield running.intdigest()
