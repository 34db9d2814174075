"""KV caches with known contents: a function of prompt, group, layer, plane, head, token, number."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from host.memory_file import MemoryFile
from kv_transfer.base import KVCacheHandle
from kv_transfer.group_sizes import share_page_size
from kv_transfer.layout import DTYPE_BYTES, STATE_SPAN, BlockIds, KVGroup, KVLayout, attention_group
from kv_transfer.planes import HeadRange, Plane

UNTOUCHED = 0xA5
NO_BLOCK = -1
"""Stands where a window needs no block any more: nobody may look there."""

WordArray = npt.NDArray[np.generic]
ByteArray = npt.NDArray[np.uint8]
GroupBlocks = list[int] | BlockIds
"""Block ids by group; those of the only group may stand alone."""


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


WINDOW = 40


def compressed(*, tp_size: int = 1, block_size: int = 16) -> KVLayout:
    """Layers in three groups each: a window, rows of 4 or 32 tokens, and the tokens of rows that
    are still open. What overlaps needs those of the row before, too."""
    window, index = Plane("kv", 1, 16, replicated=True), Plane("index", 1, 4, replicated=True)
    open_planes = tuple(Plane(name, 1, 32, replicated=True) for name in ("kv", "gate"))

    def rows(
        layers: tuple[int, ...], *planes: Plane, ratio: int = 1, window: int | None = None,
        align: int = 1,
    ) -> KVGroup:  # fmt: skip
        return KVGroup(
            layers=layers,
            planes=planes,
            block_size=block_size * ratio,
            dtype="bfloat16",
            window=window,
            compress_ratio=ratio,
            window_align=align,
        )

    groups = share_page_size(
        [
            rows((0, 2), window, window=WINDOW),
            rows((1, 3), window, window=WINDOW),
            rows((0, 2), window, index, ratio=4),
            rows((0, 2), *open_planes, window=5, align=4),
            rows((1, 3), window, ratio=32),
            rows((1, 3), *open_planes, window=1, align=32),
        ],
        tp_size,
    )
    return KVLayout(groups=groups, tp_size=tp_size, model_hash="model")


def full_and_window(*, tp_size: int = 1, block_size: int = 16) -> KVLayout:
    """Full attention in every third layer, a window in the others, with fewer but longer heads. The
    block size of the window is larger, and its pages leave something unused."""
    full = attention_group(
        layers=[2, 5], heads=4, head_dim=8, dtype="bfloat16", block_size=block_size
    )
    window = attention_group(
        layers=[0, 1, 3, 4], heads=2, head_dim=6, dtype="bfloat16", block_size=block_size,
        window=WINDOW,
    )  # fmt: skip
    groups = share_page_size([full, window], tp_size)
    return KVLayout(groups=groups, tp_size=tp_size, model_hash="model")


def latent(*, tp_size: int = 1, block_size: int = 16) -> KVLayout:
    """One latent vector a token, which every rank has, and the positions' part beside it."""
    planes = (Plane("latent", 1, 24, replicated=True), Plane("rope", 1, 8, replicated=True))
    group = KVGroup(layers=(0, 1, 2), planes=planes, block_size=block_size, dtype="bfloat16")
    return KVLayout(groups=(group,), tp_size=tp_size, model_hash="model")


def scaled_and_latent(*, tp_size: int = 1, block_size: int = 16) -> KVLayout:
    """Keys and values of one byte with their scales and a feature that every rank has; then a
    group of latent vectors with a window."""
    scaled = KVGroup(
        layers=(0, 2),
        planes=(
            Plane("k", 4, 8),
            Plane("v", 4, 8),
            Plane("k_scale", 4, 2),
            Plane("v_scale", 4, 2),
            Plane("feature", 1, 10, replicated=True),
        ),
        block_size=block_size,
        dtype="bfloat16",
    )
    shared = KVGroup(
        layers=(1,),
        planes=(Plane("latent", 1, 20, replicated=True),),
        block_size=block_size,
        dtype="bfloat16",
        window=WINDOW,
    )
    groups = share_page_size([scaled, shared], tp_size)
    return KVLayout(groups=groups, tp_size=tp_size, model_hash="model")


def states_and_full(*, tp_size: int = 1, block_size: int = 16) -> KVLayout:
    """Full attention in every third layer, in the others a state whose planes have other numbers of
    heads, and which is larger than a block of 16 tokens."""
    full = attention_group(
        layers=[2, 5], heads=2, head_dim=4, dtype="bfloat16", block_size=block_size
    )
    planes = (Plane("state", 8, 160), Plane("q", 4, 12), Plane("k", 4, 12), Plane("v", 8, 10))
    states = [
        KVGroup(layers=layers, planes=planes, block_size=STATE_SPAN, dtype="bfloat16")
        for layers in ((0, 3), (1, 4))
    ]
    groups = share_page_size([full, *states], tp_size)
    return KVLayout(groups=groups, tp_size=tp_size, model_hash="model")


def plane_rows(
    seed: int, group: int, layer: int, plane: int, heads: HeadRange, tokens: range, row_bytes: int
) -> ByteArray:
    """`[heads, tokens, row_bytes]`, the same on every node."""
    head, token, number = np.ix_(range(heads.start, heads.stop), tokens, range(row_bytes // 2))
    words = seed * 40503 + group * 577 + layer * 7919 + plane * 31337
    words = words + head * 1009 + token * 131 + number * 17 + 1
    return (words & 0xFFFF).astype("<u2").view(np.uint8)


def prompt_kv(
    seed: int, layer: int, heads: HeadRange, tokens: range, shape: KVLayout
) -> npt.NDArray[np.generic]:
    """`[2, heads, tokens, head_dim]` of a layout with one group of keys and values."""
    row_bytes = shape.groups[0].planes[0].row_bytes
    planes = [plane_rows(seed, 0, layer, plane, heads, tokens, row_bytes) for plane in range(2)]
    return np.stack(planes).view(word_dtype(shape))


def by_group(block_ids: GroupBlocks) -> BlockIds:
    return block_ids if isinstance(block_ids, tuple) else (block_ids,)


def _by_block(tokens: range, block_size: int) -> Iterator[tuple[range, int]]:
    """Yields tokens that share a block, and the block's number in its table."""
    start = tokens.start
    while start < tokens.stop:
        number = start // block_size
        stop = min(tokens.stop, (number + 1) * block_size)
        yield range(start, stop), number
        start = stop


class RankCache:
    """One rank's cache in a memory file. Bytes that nobody wrote are UNTOUCHED."""

    current_stream: Callable[[], int] | None = None

    def __init__(self, shape: KVLayout, rank: int, num_blocks: int, first_layer: int = 0) -> None:
        """`shape` has the layers of the rank's stage; `first_layer` is the number of the first."""
        self.layout = shape
        self.first_layer = first_layer
        self.rank = rank
        self.heads = shape.page(0, rank).heads[0]
        self.num_blocks = num_blocks
        self._allocate()

    def _allocate(self) -> None:
        shape, num_blocks = self.layout, self.num_blocks
        self.memory = MemoryFile.create("test-kv", num_blocks * shape.block_bytes)
        flat = np.frombuffer(self.memory.buffer, np.uint8)
        flat[:] = UNTOUCHED
        self.pages = flat.reshape(shape.num_slots, num_blocks, shape.page_bytes)
        self.words: WordArray = flat.view(word_dtype(shape))
        """A view; of one group of keys and values `[layers, num_blocks, 2, heads, block, dim]`."""
        names = [plane.name for plane in shape.groups[0].planes]
        if len(shape.groups) == 1 and names == ["k", "v"]:
            block_size = shape.groups[0].block_size
            self.words = self.words.reshape(
                shape.num_slots, num_blocks, 2, self.heads.count, block_size, head_dim(shape)
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

    def write(self, seed: int, layer: int, tokens: range, block_ids: GroupBlocks) -> None:
        """Writes as a worker does in one layer of one step; where a window has let go of a token's
        block, there is nowhere to write it. A row is written with the last of its tokens."""
        for group, slot in self._slots_of(layer):
            kind = self.layout.groups[group]
            ratio = kind.compress_ratio
            written = range(tokens.start // ratio, tokens.stop // ratio)
            for plane, lies in enumerate(self.layout.page(group, self.rank).planes):
                values = plane_rows(
                    seed,
                    group,
                    self.first_layer + layer,
                    plane,
                    lies.heads,
                    written,
                    lies.row_bytes,
                )
                for part, number in _by_block(written, kind.block_size // ratio):
                    block = by_group(block_ids)[group][number]
                    if block == NO_BLOCK:
                        continue
                    page = self.pages[slot, block, lies.offset : lies.offset + lies.num_bytes]
                    rows = page.reshape(lies.heads.count, lies.block_size, lies.row_bytes)
                    # Every token overwrites a state: where an offset repeats, the last one stays.
                    offsets = np.arange(part.start, part.stop) % kind.rows_per_block
                    rows[:, offsets] = values[:, part.start - written.start :][:, : len(part)]

    def check(self, seed: int, tokens: range, block_ids: GroupBlocks) -> None:
        """Tokens are there in every layer, unless a window has no use for them; all else in these
        blocks is as it was."""
        for layer in range(self.layout.num_layers):
            for group, slot in self._slots_of(layer):
                self._check(seed, layer, group, slot, tokens, by_group(block_ids)[group])

    def _check(
        self, seed: int, layer: int, group: int, slot: int, tokens: range, block_ids: list[int]
    ) -> None:
        kind, page = self.layout.groups[group], self.layout.page(group, self.rank)
        wanted = kind.rows_to_pull(tokens.start, tokens.stop)
        tokens = kind.tokens_to_pull(tokens.start, tokens.stop)
        first = tokens.start // kind.block_size
        values = tokens if kind.is_state else wanted
        found = self.pages_of(slot, block_ids[first:])
        for plane, lies in enumerate(page.planes):
            rows = found[:, lies.offset : lies.offset + lies.num_bytes].reshape(
                -1, lies.heads.count, lies.block_size, lies.row_bytes
            )
            flat = np.moveaxis(rows, 0, 1).reshape(lies.heads.count, -1, lies.row_bytes)
            expected = np.full_like(flat, UNTOUCHED)
            skip = first * kind.rows_per_block
            expected[:, wanted.start - skip : wanted.stop - skip] = plane_rows(
                seed, group, self.first_layer + layer, plane, lies.heads, values, lies.row_bytes
            )
            np.testing.assert_array_equal(flat, expected)
        assert (found[:, page.num_bytes :] == UNTOUCHED).all(), "unused bytes were written"

    def _slots_of(self, layer: int) -> Iterator[tuple[int, int]]:
        """Yields (group, slot) of what this layer of the model caches."""
        for group, kind in enumerate(self.layout.groups):
            if layer in kind.layers:
                yield group, kind.layers.index(layer)

    def pages_of(self, slot: int, block_ids: list[int]) -> ByteArray:
        """A copy, `[n, page_bytes]`."""
        return self.pages[slot, block_ids]

    def untouched_except(self, block_ids: GroupBlocks) -> bool:
        used = [block for group in by_group(block_ids) for block in group if block != NO_BLOCK]
        return bool((np.delete(self.pages, used, axis=1) == UNTOUCHED).all())

    def close(self) -> None:
        del self.words, self.pages
        self.memory.close()


class Blocks:
    """Hands out blocks in no particular order, each once."""

    def __init__(self, num_blocks: int, seed: int = 0) -> None:
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)

    def take(self, shape: KVLayout, num_tokens: int) -> list[int]:
        """Returns new blocks of a layout with one group."""
        (block_ids,) = self.take_all(shape, num_tokens)
        return block_ids

    def take_all(self, shape: KVLayout, num_tokens: int) -> BlockIds:
        """Returns new blocks by group; where a window has no use for a block there is none."""
        return tuple(
            [
                self.free.pop() if number >= group.first_block_seen(num_tokens) else NO_BLOCK
                for number in range(group.num_blocks_for(num_tokens))
            ]
            for group in shape.groups
        )
