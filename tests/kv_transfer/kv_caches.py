"""KV caches with known contents: a function of (prompt, layer, key or value, head, token, dim)."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from host.memory_file import MemoryFile
from kv_transfer.base import KVCacheHandle
from kv_transfer.layout import DTYPE_BYTES, HeadRange, KVLayout, attention_group

UNTOUCHED = 0xA5

WordArray = npt.NDArray[np.generic]


def word_dtype(layout: KVLayout) -> np.dtype[np.generic]:
    """A word as wide as one number of the cache."""
    return np.dtype(f"u{DTYPE_BYTES[layout.groups[0].dtype]}")


def head_dim(layout: KVLayout) -> int:
    group = layout.groups[0]
    return group.planes[0].row_bytes // DTYPE_BYTES[group.dtype]


def layout(
    *, tp_size: int = 1, block_size: int = 16, num_layers: int = 3, num_kv_heads: int = 2
) -> KVLayout:
    group = attention_group(
        layers=range(num_layers),
        heads=num_kv_heads,
        head_dim=8,
        dtype="bfloat16",
        block_size=block_size,
    )
    return KVLayout(groups=(group,), tp_size=tp_size, model_hash="model")


def prompt_kv(
    seed: int, layer: int, heads: HeadRange, tokens: range, shape: KVLayout
) -> npt.NDArray[np.generic]:
    """`[2, heads, tokens, head_dim]`, the same on every node."""
    kv, head, token, dim = np.ix_(
        range(2), range(heads.start, heads.stop), tokens, range(head_dim(shape))
    )
    words = seed * 40503 + layer * 7919 + kv * 31337 + head * 1009 + token * 131 + dim * 17 + 1
    return (words & 0xFFFF).astype(word_dtype(shape))


class RankCache:
    """One rank's cache in a memory file. Bytes that nobody wrote are UNTOUCHED."""

    current_stream: Callable[[], int] | None = None

    def __init__(self, shape: KVLayout, rank: int, num_blocks: int) -> None:
        self.layout = shape
        self.rank = rank
        self.heads = shape.page(0, rank).heads[0]
        self.num_blocks = num_blocks
        self.memory = MemoryFile.create("test-kv", num_blocks * shape.block_bytes)
        np.frombuffer(self.memory.buffer, np.uint8)[:] = UNTOUCHED
        self.words: WordArray = np.frombuffer(self.memory.buffer, word_dtype(shape)).reshape(
            shape.num_layers,
            num_blocks,
            2,
            self.heads.count,
            shape.groups[0].block_size,
            head_dim(shape),
        )

    @property
    def handle(self) -> KVCacheHandle:
        return KVCacheHandle(
            rank=self.rank, pid=os.getpid(), fd=self.memory.fd, num_blocks=self.num_blocks
        )

    @property
    def tensor(self) -> torch.Tensor:
        """All of it, as a worker has it."""
        return torch.from_numpy(self.words.view(np.int16))

    def write(self, seed: int, layer: int, tokens: range, block_ids: list[int]) -> None:
        """What a worker does in one layer of one step."""
        values = prompt_kv(seed, layer, self.heads, tokens, self.layout)
        for i, token in enumerate(tokens):
            block, offset = divmod(token, self.layout.groups[0].block_size)
            self.words[layer, block_ids[block], :, :, offset] = values[:, :, i]

    def check(self, seed: int, tokens: range, block_ids: list[int]) -> None:
        """Tokens are there in every layer; all else in these blocks is as it was."""
        size = self.layout.groups[0].block_size
        dtype = word_dtype(self.layout)
        untouched = int.from_bytes(bytes([UNTOUCHED]) * dtype.itemsize, "little")
        for layer in range(self.layout.num_layers):
            blocks = self.blocks(layer, block_ids)
            flat = np.moveaxis(blocks, 0, 2).reshape(
                2, self.heads.count, len(block_ids) * size, head_dim(self.layout)
            )
            expected = np.full_like(flat, untouched)
            expected[:, :, tokens.start : tokens.stop] = prompt_kv(
                seed, layer, self.heads, tokens, self.layout
            )
            np.testing.assert_array_equal(flat, expected)

    def blocks(self, layer: int, block_ids: list[int]) -> WordArray:
        """A copy, `[n, 2, heads, block_size, head_dim]`."""
        return self.words[layer, block_ids]

    def untouched_except(self, block_ids: list[int]) -> bool:
        others = np.delete(self.words, block_ids, axis=1)
        return bool((others.view(np.uint8) == UNTOUCHED).all())

    def close(self) -> None:
        del self.words
        self.memory.close()


class Blocks:
    """Hands out blocks in no particular order, each once."""

    def __init__(self, num_blocks: int, seed: int = 0) -> None:
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)

    def take(self, shape: KVLayout, num_tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(shape.num_blocks_for(num_tokens)[0])]
