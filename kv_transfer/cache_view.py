"""One rank's KV cache, mapped into a transfer process: blocks out, tokens in.

The cache is `[num_layers][num_blocks, 2, local_kv_heads, block_size, head_dim]`. Numbers are only
moved, never computed with, so bfloat16 and float16 are 16-bit words here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.base import KVCacheHandle
from kv_transfer.host.memory_file import MemoryFile
from kv_transfer.layout import DTYPE_BYTES, HeadRange, KVLayout

WordArray = npt.NDArray[np.generic]


def word_dtype(layout: KVLayout) -> np.dtype[np.generic]:
    """A word as wide as one number of the cache."""
    return np.dtype(f"u{DTYPE_BYTES[layout.dtype]}")


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Adjacent tokens that lie in one block on both sides."""

    source_block: int
    source_offset: int
    target_block: int
    target_offset: int
    num_tokens: int


def token_runs(start: int, stop: int, source_size: int, target_size: int) -> Iterator[TokenRun]:
    """Cuts tokens [start, stop) at the block bounds of both sides. Blocks are logical."""
    token = start
    while token < stop:
        source_block, source_offset = divmod(token, source_size)
        target_block, target_offset = divmod(token, target_size)
        room = min(source_size - source_offset, target_size - target_offset, stop - token)
        yield TokenRun(source_block, source_offset, target_block, target_offset, room)
        token += room


class KVCacheView:
    """The cache of one rank. `close` when no transfer is left."""

    def __init__(self, handle: KVCacheHandle, layout: KVLayout) -> None:
        """Raises ValueError when the memory file does not hold such a cache."""
        self._memory = MemoryFile.attach(handle.pid, handle.fd)
        self.num_blocks = handle.num_blocks
        needed = layout.num_layers * handle.num_blocks * layout.block_bytes
        if self._memory.size < needed:
            raise ValueError(
                f"the KV cache of rank {handle.rank} has {self._memory.size} bytes, "
                f"but {handle.num_blocks} blocks take {needed}"
            )
        self._heads = layout.heads_of_rank(handle.rank)
        words: WordArray = np.frombuffer(
            self._memory.buffer,
            word_dtype(layout),
            count=needed // DTYPE_BYTES[layout.dtype],
        )
        self._layers = words.reshape(
            layout.num_layers,
            handle.num_blocks,
            2,
            layout.local_kv_heads,
            layout.block_size,
            layout.head_dim,
        )

    def check_block_ids(self, block_ids: list[int]) -> None:
        """Raises ValueError for a block that the cache lacks."""
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            raise ValueError(f"block ids must lie in 0..{self.num_blocks - 1}")

    def read_blocks(self, layer: int, block_ids: list[int]) -> list[WordArray]:
        """Views of the blocks in order, neighbours in memory as one: `[n, 2, heads, B, D]`."""
        cache = self._layers[layer]
        views: list[WordArray] = []
        start = 0
        for i in range(1, len(block_ids) + 1):
            if i == len(block_ids) or block_ids[i] != block_ids[i - 1] + 1:
                views.append(cache[block_ids[start] : block_ids[i - 1] + 1])
                start = i
        return views

    def write_run(
        self, layer: int, heads: HeadRange, source: WordArray, run: TokenRun, block_id: int
    ) -> None:
        """`source`: one block of the sender, `[2, heads.count, its block size, D]`. `block_id`:
        our physical block for `run.target_block`."""
        first_head = heads.start - self._heads.start
        target_stop = run.target_offset + run.num_tokens
        source_stop = run.source_offset + run.num_tokens
        np.copyto(
            self._layers[
                layer,
                block_id,
                :,
                first_head : first_head + heads.count,
                run.target_offset : target_stop,
            ],
            source[:, :, run.source_offset : source_stop],
        )

    def close(self) -> None:
        del self._layers
        self._memory.close()
