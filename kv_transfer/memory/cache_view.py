"""One rank's KV cache, mapped into a transfer process: blocks out, tokens in.

`kv_transfer.layout` says how KV lies in the cache, which is in host or GPU memory. This file only
computes addresses; `kv_transfer.memory` copies. Numbers are only moved, never computed with.

    1. `KVCacheView(handle, layout)`   maps the cache
    2. `copy_out`                      issues copies on `copies.stream`, as those who write do with
                                       `copy_blocks` and `copy_runs`; `copies` says when they are
                                       done
    3. `close`                         when no transfer is left
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kv_transfer.base import KVCacheHandle
from kv_transfer.layout import BlockIds, KVLayout
from kv_transfer.memory.devices.choice import device_of
from kv_transfer.memory.devices.copy_queue import CopyQueue
from kv_transfer.memory.devices.copy_stream import CopyStream, Numbers
from kv_transfer.memory.devices.device import MemoryDevice
from kv_transfer.memory.inbox import Inbox
from kv_transfer.memory.page_copy import PageCopy


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


def copy_blocks(
    stream: CopyStream, copy: PageCopy, targets: Numbers, sources: Numbers, from_host: bool
) -> None:
    """Issues copies of whole blocks, all by address."""
    copy_joined(stream, *copy.of_blocks(targets, sources), from_host)


def copy_joined(
    stream: CopyStream, targets: Numbers, sources: Numbers, sizes: Numbers, in_portions: bool
) -> None:
    """Issues copies; those that continue each other on both sides become one."""
    if not len(targets):
        return
    goes_on = targets[1:] - targets[:-1] == sizes[:-1]
    goes_on &= sources[1:] - sources[:-1] == sizes[:-1]
    if goes_on.any():
        first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
        targets, sources = targets[first], sources[first]
        sizes = np.add.reduceat(sizes, first)
    stream.copy(targets, sources, sizes, in_portions)


def copy_runs(
    stream: CopyStream, copy: PageCopy, runs: Iterable[tuple[int, TokenRun, int]]
) -> None:
    """Issues copies of tokens between blocks.

    `runs`: (address of the source block, which tokens, address of the target block).
    """
    for source, run, target in runs:
        for rows in copy.rows:
            stream.copy_rows(
                target + rows.target + run.target_offset * rows.row_bytes,
                rows.target_pitch,
                source + rows.source + run.source_offset * rows.row_bytes,
                rows.source_pitch,
                run.num_tokens * rows.row_bytes,
                rows.num_rows,
            )


class CachePlaces:
    """Tells where the blocks of one rank's cache lie, from `address` on."""

    def __init__(self, rank: int, num_blocks: int, layout: KVLayout, address: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.address = address
        self.pages = tuple(layout.page(group, rank) for group in range(len(layout.groups)))
        """Shapes of a page, by group."""
        self.places = tuple(layout.places(group) for group in range(len(layout.groups)))
        self.page_bytes = layout.page_bytes
        self.slot_bytes = num_blocks * layout.page_bytes
        self.num_bytes = num_blocks * layout.block_bytes

    def check_block_ids(self, block_ids: list[int]) -> None:
        """Raises ValueError for a block that the cache lacks."""
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            raise ValueError(f"block ids must lie in 0..{self.num_blocks - 1}")

    def check_blocks(self, block_ids: BlockIds, first_token: int, num_tokens: int) -> None:
        """Raises ValueError unless the cache has all of these blocks of a prompt of `num_tokens`
        whose tokens must be pulled by a node that has the first `first_token`."""
        for group, ids in zip(self.layout.groups, block_ids, strict=True):
            self.check_block_ids(ids[group.blocks_to_pull(first_token, num_tokens).start :])

    def page_of(self, group: int, layer: int, block_id: int) -> int:
        """Returns where the page of a block begins that a layer of a group has, counted in it."""
        slot, inside = self.places[group].place_of(layer)
        return self.address + slot * self.slot_bytes + block_id * self.page_bytes + inside

    def pages_of(
        self, group: int, layers: int | Numbers, block_ids: list[int] | Numbers
    ) -> Numbers:
        """Returns the pages of one block of each of these layers of a group, or of blocks of one
        layer."""
        first, count, size = self.places[group]
        if count == 1:
            return self.addresses_of(layers + first, block_ids)
        return self.addresses_of(layers // count + first, block_ids) + layers % count * size

    def addresses_of(self, slots: int | Numbers, block_ids: list[int] | Numbers) -> Numbers:
        """Returns the addresses of one block in each of these slots, or of blocks in one slot."""
        inside = slots * self.slot_bytes + np.asarray(block_ids, np.int64) * self.page_bytes
        return inside + self.address


class CacheMap(CachePlaces):
    """The cache of one rank at addresses of this process."""

    def __init__(self, handle: KVCacheHandle, layout: KVLayout, device: MemoryDevice) -> None:
        """Raises:
        ValueError: The memory does not hold such a cache.
        DeviceError, OSError: It cannot be mapped.
        """
        self.handle = handle
        super().__init__(handle.rank, handle.num_blocks, layout, 0)
        self._mapping = device.open_cache(handle)
        self.address = self._mapping.address
        if self._mapping.num_bytes < self.num_bytes:
            self._mapping.close()
            raise ValueError(
                f"the KV cache of rank {handle.rank} has {self._mapping.num_bytes} bytes, "
                f"but {handle.num_blocks} blocks take {self.num_bytes}"
            )

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
        """Maps the cache. Raises as `CacheMap` does.

        `inbox_bytes`: host memory for KV that arrives, where copies take time, in messages of at
        most `message_bytes` if it shall be quick.
        """
        self.device = device if device is not None else device_of(handle)
        super().__init__(handle, layout, self.device)
        self.copies = CopyQueue(self.device.new_stream())
        self.inbox = Inbox(self.device, self.copies, inbox_bytes, message_bytes)

    def copy_out(self, group: int, layer: int, block_ids: list[int], target: int) -> None:
        """Issues copies of the pages, one behind the other and without what they leave unused;
        neighbours move together."""
        size = self.pages[group].num_bytes
        targets = target + size * np.arange(len(block_ids))
        sources = self.pages_of(group, layer, block_ids)
        sizes = np.full(len(block_ids), size)
        copy_joined(self.copies.stream, targets, sources, sizes, in_portions=True)

    def close(self) -> None:
        """Waits for copies that are on their way."""
        self.copies.close()
        super().close()
