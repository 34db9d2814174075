"""Guesses which prefixes our engine still has in its KV cache.

The engine knows exactly, in another process. For the choice between prefill here and elsewhere a
guess at hand is better: this remembers the blocks of requests that ended here, as many as the
cache has, and forgets the least recently used ones. A wrong guess costs time, never correctness. Of
prompts with images, which have equal tokens for different images, it knows nothing.

    CachedPrefixes   all full blocks of what ended here
    CachedStates     of models with states, where the engine keeps those: behind the last full block
                     of an answer, and of a prompt that was computed here
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

    def add(
        self, token_ids: Sequence[int], spec: RequestSpec, group: int = 0, *, is_local: bool = True
    ) -> None:
        """Remembers a request that has ended here: its prompt, which was computed here if it
        `is_local`, and its answer."""
        if not self._capacity or spec.images:
            return
        blocks = self._groups[group]
        for stop, block in self._hashes(token_ids, spec):
            if self._is_kept(stop, len(token_ids), spec, is_local):
                blocks[block] = None
                blocks.move_to_end(block)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)

    def num_cached_tokens(self, token_ids: Sequence[int], spec: RequestSpec) -> list[int]:
        """Returns how many leading tokens each group need not compute; the last one always is."""
        counts = [0] * len(self._groups)
        if len(self) and not spec.images:
            self._count(counts, self._hashes(token_ids, spec))
        return [min(count, len(token_ids) - 1) for count in counts]

    def _is_kept(self, stop: int, num_tokens: int, spec: RequestSpec, is_local: bool) -> bool:
        """Returns whether a prompt may begin with the first `stop` of a request's tokens here."""
        return True

    def _count(self, counts: list[int], hashes: Iterator[tuple[int, int]]) -> None:
        """Sets how many tokens of these hashes each group has."""
        going_on = list(enumerate(self._groups))
        for stop, block in hashes:
            going_on = [(group, blocks) for group, blocks in going_on if block in blocks]
            if not going_on:
                break
            for group, _ in going_on:
                counts[group] = stop

    def _hashes(self, token_ids: Sequence[int], spec: RequestSpec) -> Iterator[tuple[int, int]]:
        """Yields the end of each full block, and its hash."""
        size = self._block_size
        running = xxhash.xxh3_64(root_hash(spec))
        for stop in range(size, len(token_ids) + 1, size):
            running.update(array("i", token_ids[stop - size : stop]))
            yield stop, running.intdigest()


class CachedStates(CachedPrefixes):
    """Remembers where states are kept, with the keys and values before them. `drafts`: the engine
    does, and keeps none behind answers."""

    def __init__(
        self, capacity: int, stride: int, num_groups: int = 1, *, drafts: bool = False
    ) -> None:
        super().__init__(capacity, stride, num_groups)
        self._stride = stride
        self._drafts = drafts

    def _is_kept(self, stop: int, num_tokens: int, spec: RequestSpec, is_local: bool) -> bool:
        num_prompt = len(spec.prompt_token_ids)
        if stop >= num_prompt:
            is_alone = spec.num_rows == 1
            return is_alone and not self._drafts and stop == self._last_place(num_tokens)
        return is_local and stop == self._last_place(num_prompt)

    def _count(self, counts: list[int], hashes: Iterator[tuple[int, int]]) -> None:
        for stop, block in hashes:
            for group, blocks in enumerate(self._groups):
                if block in blocks:
                    counts[group] = stop

    def _last_place(self, num_tokens: int) -> int:
        """Returns where states are kept once a token more is computed."""
        return (num_tokens - 1) // self._stride * self._stride
