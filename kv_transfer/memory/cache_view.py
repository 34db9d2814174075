"""One rank's KV cache, mapped into a transfer process: blocks out, tokens in.

The cache is `[num_layers][num_blocks, 2, local_kv_heads, block_size, head_dim]`, in host or GPU
memory. This file only computes addresses; `kv_transfer.memory` copies. Numbers are only moved,
never computed with.

    1. `KVCacheView(handle, layout)`   maps the cache
    2. `copy_out`, `write_blocks`, `write_runs`   issue copies on `copies.stream`; `copies` says
                                       when they are done
    3. `close`                         when no transfer is left
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kv_transfer.base import KVCacheHandle
from kv_transfer.layout import HeadRange, KVLayout
from kv_transfer.memory.copy_queue import CopyQueue
from kv_transfer.memory.copy_stream import Numbers
from kv_transfer.memory.device import MemoryDevice
from kv_transfer.memory.devices import device_of
from kv_transfer.memory.inbox import Inbox


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


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block as it lies in memory: `[2, heads.count, block_size, head_dim]` of numbers."""

    heads: HeadRange
    """Of all that the model has."""
    block_size: int
    row_bytes: int
    """Of one token of one head."""

    @property
    def head_bytes(self) -> int:
        return self.block_size * self.row_bytes

    @property
    def num_bytes(self) -> int:
        return 2 * self.part_bytes

    @property
    def part_bytes(self) -> int:
        """Of its keys, or of its values."""
        return self.heads.count * self.head_bytes

    def offset_of(self, head: int) -> int:
        """Where its keys begin."""
        return (head - self.heads.start) * self.head_bytes

    @classmethod
    def of(cls, layout: KVLayout, heads: HeadRange) -> BlockShape:
        group = layout.groups[0]
        return cls(heads, group.block_size, group.planes[0].row_bytes)


class CacheMap:
    """The cache of one rank at addresses of this process."""

    def __init__(self, handle: KVCacheHandle, layout: KVLayout, device: MemoryDevice) -> None:
        """Raises:
        ValueError: The memory does not hold such a cache.
        DeviceError, OSError: It cannot be mapped.
        """
        self.handle = handle
        self.num_blocks = handle.num_blocks
        self.shape = BlockShape.of(layout, layout.page(0, handle.rank).heads[0])
        self._layer_bytes = handle.num_blocks * layout.page_bytes
        needed = layout.num_layers * self._layer_bytes
        self._mapping = device.open_cache(handle)
        if self._mapping.num_bytes < needed:
            self._mapping.close()
            raise ValueError(
                f"the KV cache of rank {handle.rank} has {self._mapping.num_bytes} bytes, "
                f"but {handle.num_blocks} blocks take {needed}"
            )

    def check_block_ids(self, block_ids: list[int]) -> None:
        """Raises ValueError for a block that the cache lacks."""
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            raise ValueError(f"block ids must lie in 0..{self.num_blocks - 1}")

    def address_of(self, layer: int, block_id: int) -> int:
        """Of one block of one layer."""
        start = self._mapping.address + layer * self._layer_bytes
        return start + block_id * self.shape.num_bytes

    def addresses_of(self, layers: int | Numbers, block_ids: list[int] | Numbers) -> Numbers:
        """Of one block in each of these layers, or of blocks in one layer."""
        inside = layers * self._layer_bytes + np.asarray(block_ids, np.int64) * self.shape.num_bytes
        return inside + self._mapping.address

    def close(self) -> None:
        """No copy may be on its way."""
        self._mapping.close()


class KVCacheView(CacheMap):
    """The cache of our own rank. Used from one thread."""

    def __init__(
        self,
        handle: KVCacheHandle,
        layout: KVLayout,
        inbox_bytes: int = 0,
        message_bytes: int = 1 << 20,
        device: MemoryDevice | None = None,
    ) -> None:
        """`inbox_bytes`: host memory for KV that arrives, where copies take time, in messages of at
        most `message_bytes` if it shall be quick. Raises as `CacheMap` does."""
        self.device = device if device is not None else device_of(handle)
        super().__init__(handle, layout, self.device)
        self.copies = CopyQueue(self.device.new_stream())
        self.inbox = Inbox(self.device, self.copies, inbox_bytes, message_bytes)

    def copy_out(self, layer: int, block_ids: list[int], target: int) -> None:
        """The blocks one behind the other, `[n, 2, heads, B, D]`; neighbours move together."""
        size = self.shape.num_bytes
        targets = target + size * np.arange(len(block_ids))
        self._copy_joined(targets, self.addresses_of(layer, block_ids), size, in_portions=True)

    def write_blocks(
        self,
        heads: HeadRange,
        targets: Numbers,
        source_shape: BlockShape,
        sources: Numbers,
        from_host: bool,
    ) -> None:
        """These heads of whole blocks into blocks of ours, all by address. Both have equally many
        tokens, so a head lies in one piece, and so do all heads if each side has no others."""
        ours = self.shape
        if source_shape == ours and heads == ours.heads:
            self._copy_joined(targets, sources, ours.num_bytes, from_host)
            return
        parts = np.arange(2)
        targets = targets + ours.offset_of(heads.start)
        sources = sources + source_shape.offset_of(heads.start)
        self._copy_joined(
            np.add.outer(targets, parts * ours.part_bytes).ravel(),
            np.add.outer(sources, parts * source_shape.part_bytes).ravel(),
            heads.count * ours.head_bytes,
            from_host,
        )

    def _copy_joined(
        self, targets: Numbers, sources: Numbers, num_bytes: int, in_portions: bool
    ) -> None:
        """Copies of equal size; those that continue each other on both sides become one."""
        if not len(targets):
            return
        sizes = np.full(len(targets), num_bytes)
        goes_on = targets[1:] - targets[:-1] == num_bytes
        goes_on &= sources[1:] - sources[:-1] == num_bytes
        if goes_on.any():
            first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
            targets, sources = targets[first], sources[first]
            sizes = np.diff(first, append=len(sizes)) * num_bytes
        self.copies.stream.copy(targets, sources, sizes, in_portions)

    def write_runs(
        self,
        heads: HeadRange,
        source_shape: BlockShape,
        runs: Iterable[tuple[int, TokenRun, int]],
    ) -> None:
        """These heads of tokens into blocks of ours.

        `runs`: (address of the source block, which tokens, address of our block).
        """
        ours = self.shape
        for source, run, target in runs:
            self._copy_box(
                target + ours.offset_of(heads.start) + run.target_offset * ours.row_bytes,
                source + source_shape.offset_of(heads.start) + run.source_offset * ours.row_bytes,
                source_shape,
                heads.count,
                run.num_tokens,
            )

    def _copy_box(
        self, target: int, source: int, source_shape: BlockShape, num_heads: int, num_tokens: int
    ) -> None:
        """`[2, num_heads, num_tokens]` out of one block into another."""
        ours = self.shape
        if num_heads == ours.heads.count == source_shape.heads.count:
            parts, num_rows = 1, 2 * num_heads
        else:
            parts, num_rows = 2, num_heads
        for part in range(parts):
            self.copies.stream.copy_rows(
                target + part * ours.part_bytes,
                ours.head_bytes,
                source + part * source_shape.part_bytes,
                source_shape.head_bytes,
                num_tokens * ours.row_bytes,
                num_rows,
            )

    def close(self) -> None:
        """Waits for copies that are on their way."""
        self.copies.close()
        super().close()
