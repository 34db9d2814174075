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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kv_transfer.base import KVCacheHandle
from kv_transfer.layout import DTYPE_BYTES, HeadRange, KVLayout
from kv_transfer.memory.copy_queue import CopyQueue
from kv_transfer.memory.copy_stream import CopyStream
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
    """A block as it lies in memory: `[2, num_heads, block_size, head_dim]` of numbers."""

    num_heads: int
    block_size: int
    row_bytes: int
    """Of one token of one head."""

    @property
    def head_bytes(self) -> int:
        return self.block_size * self.row_bytes

    @property
    def num_bytes(self) -> int:
        return 2 * self.num_heads * self.head_bytes

    @classmethod
    def of(cls, layout: KVLayout, num_heads: int) -> BlockShape:
        return cls(num_heads, layout.block_size, layout.head_dim * DTYPE_BYTES[layout.dtype])


class JoinedCopies:
    """Issues copies; those that continue each other on both sides become one."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._target = self._source = self._num_bytes = 0

    def add(self, target: int, source: int, num_bytes: int) -> None:
        end = self._num_bytes
        if target == self._target + end and source == self._source + end:
            self._num_bytes += num_bytes
            return
        self.flush()
        self._target, self._source, self._num_bytes = target, source, num_bytes

    def flush(self) -> None:
        if self._num_bytes:
            self._stream.copy(self._target, self._source, self._num_bytes)
        self._num_bytes = 0


class CacheMap:
    """The cache of one rank at addresses of this process."""

    def __init__(self, handle: KVCacheHandle, layout: KVLayout, device: MemoryDevice) -> None:
        """Raises:
        ValueError: The memory does not hold such a cache.
        DeviceError, OSError: It cannot be mapped.
        """
        self.handle = handle
        self.num_blocks = handle.num_blocks
        self.heads = layout.heads_of_rank(handle.rank)
        self.shape = BlockShape.of(layout, layout.local_kv_heads)
        self._layer_bytes = handle.num_blocks * layout.block_bytes
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

    def addresses_of(self, layer: int, block_ids: Iterable[int]) -> list[int]:
        start, size = self.address_of(layer, 0), self.shape.num_bytes
        return [start + block_id * size for block_id in block_ids]

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
        targets = range(target, target + len(block_ids) * size, size)
        self._copy_blocks(targets, self.addresses_of(layer, block_ids))

    def write_blocks(self, layer: int, block_ids: Sequence[int], sources: Iterable[int]) -> None:
        """Whole blocks of our own shape, from these addresses, into blocks of ours."""
        self._copy_blocks(self.addresses_of(layer, block_ids), sources)

    def _copy_blocks(self, targets: Iterable[int], sources: Iterable[int]) -> None:
        """As `JoinedCopies` does, for copies of one block each. Most KV moves so, and between GPUs
        it takes longer to issue a copy than to do it: a call for each block would double that."""
        copy, size = self.copies.stream.copy, self.shape.num_bytes
        target = source = num_bytes = 0
        for place, address in zip(targets, sources, strict=True):
            if place == target + num_bytes and address == source + num_bytes:
                num_bytes += size
                continue
            if num_bytes:
                copy(target, source, num_bytes)
            target, source, num_bytes = place, address, size
        if num_bytes:
            copy(target, source, num_bytes)

    def write_runs(
        self,
        layer: int,
        heads: HeadRange,
        source_shape: BlockShape,
        source_first_head: int,
        runs: Iterable[tuple[int, TokenRun, int]],
    ) -> None:
        """Tokens into blocks of ours.

        `runs`: (address of the source block, which tokens, our physical block). `heads` are those
        to write; in a source block they begin at head `source_first_head`.
        """
        copies = JoinedCopies(self.copies.stream)
        first_head = heads.start - self.heads.start
        ours = self.shape
        is_whole_block = ours == source_shape and heads.count == ours.num_heads
        for source, run, block_id in runs:
            target = self.address_of(layer, block_id)
            if is_whole_block and run.num_tokens == ours.block_size:
                copies.add(target, source, ours.num_bytes)
                continue
            target += first_head * ours.head_bytes + run.target_offset * ours.row_bytes
            source += source_first_head * source_shape.head_bytes
            source += run.source_offset * ours.row_bytes
            self._copy_box(target, source, source_shape, heads.count, run.num_tokens)
        copies.flush()

    def _copy_box(
        self, target: int, source: int, source_shape: BlockShape, num_heads: int, num_tokens: int
    ) -> None:
        """`[2, num_heads, num_tokens]` out of one block into another."""
        ours, stream = self.shape, self.copies.stream
        row_bytes = num_tokens * ours.row_bytes
        if num_heads == ours.num_heads == source_shape.num_heads:
            parts, num_rows = 1, 2 * num_heads
        else:
            parts, num_rows = 2, num_heads
        for part in range(parts):
            stream.copy_rows(
                target + part * ours.num_heads * ours.head_bytes,
                ours.head_bytes,
                source + part * source_shape.num_heads * source_shape.head_bytes,
                source_shape.head_bytes,
                row_bytes,
                num_rows,
            )

    def close(self) -> None:
        """Waits for copies that are on their way."""
        self.copies.close()
        super().close()
