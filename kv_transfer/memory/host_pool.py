"""Host memory of one transfer process for blocks that leave the KV cache.

    1. `HostPool`   takes memory, pinned where a GPU copies; pages are used when first touched
    2. `store`      blocks are copied to slots; then their checksums are computed, in a thread
    3. `load`       slots are copied to blocks at once; meanwhile a thread compares the checksums
    4. `close`

Both answer with a `HostTierEvent` when nothing of the job is on its way any more. A rank's
processes share each block: process i of n has layers i, i + n, ... of it.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import google_crc32c
import numpy as np

from kv_transfer.errors import KVTransferError
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.copy_queue import CopyQueue
from kv_transfer.memory.copy_stream import Numbers
from kv_transfer.metadata import HostTierEvent, LoadMeta, StoreMeta

logger = logging.getLogger(__name__)


class HostPool:
    """`num_slots` slots, each for this process's share of a block of `cache`. `emit` takes events;
    `process` is the number of ours in them."""

    def __init__(
        self,
        cache: KVCacheView,
        num_slots: int,
        share: tuple[int, int],
        process: int,
        emit: Callable[[HostTierEvent], None],
    ) -> None:
        """Takes the memory. `share`: (number of this process, processes of its rank)."""
        self._cache = cache
        self._process = process
        self._emit = emit
        index, count = share
        num_layers = cache.layout.block_bytes // cache.page_bytes
        self._layers = np.arange(index, num_layers, count)
        self._slot_bytes = len(self._layers) * cache.page_bytes
        self._arena = mmap.mmap(-1, max(1, num_slots * self._slot_bytes))
        self._memory = np.frombuffer(self._arena, np.uint8)
        self._checksums: dict[int, int] = {}
        """Has one for each slot that holds a block."""
        self._thread = ThreadPoolExecutor(1, "checksums")
        self._jobs: set[asyncio.Task[None]] = set()
        self._copies = CopyQueue(cache.device.new_stream())
        self._copies.on_error = lambda error: cache.copies.on_error(error)
        self._is_off = not self._pinned()

    async def close(self) -> None:
        """Ends without a word; no job begins any more."""
        await self._copies.settled()
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        self._thread.shutdown()
        self._copies.close()

    def store(self, meta: StoreMeta) -> None:
        self._begin(self._store(meta))

    def load(self, meta: LoadMeta) -> None:
        self._begin(self._load(meta))

    async def _store(self, meta: StoreMeta) -> None:
        if self._is_off:
            self._end(meta, meta.slots)
            return
        for slot in meta.slots:
            self._checksums.pop(slot, None)
        pages, places = self._places(meta.blocks, meta.slots)
        self._copies.stream.copy(places, pages, self._sizes(pages), in_portions=True)
        await self._copies.settled()
        self._checksums |= await self._on_thread(meta.slots)
        self._end(meta, [])

    async def _load(self, meta: LoadMeta) -> None:
        known = [slot for slot in meta.slots if slot in self._checksums]
        if len(known) < len(meta.slots):
            self._end(meta, [slot for slot in meta.slots if slot not in self._checksums])
            return
        pages, places = self._places(meta.blocks, meta.slots)
        self._copies.stream.copy(pages, places, self._sizes(pages))
        found = self._on_thread(meta.slots)
        await self._copies.settled()
        damaged = [slot for slot, code in (await found).items() if code != self._checksums[slot]]
        if damaged:
            logger.error("%d blocks of the host tier are damaged, and not used", len(damaged))
        self._end(meta, damaged)

    def _begin(self, job: asyncio._CoroutineLike[None]) -> None:
        task = asyncio.get_running_loop().create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None:
            self._cache.copies.on_error(error)

    def _end(self, meta: StoreMeta | LoadMeta, damaged: list[int]) -> None:
        for slot in damaged:
            self._checksums.pop(slot, None)
        self._emit(HostTierEvent(meta.job, self._process, damaged))

    def _on_thread(self, slots: list[int]) -> asyncio.Future[dict[int, int]]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self._codes, slots)

    def _codes(self, slots: list[int]) -> dict[int, int]:
        size = self._slot_bytes
        # Of the library, `extend` takes memory that can be written to; `value` does not.
        return {
            slot: google_crc32c.extend(0, self._memory[slot * size : (slot + 1) * size])
            for slot in slots
        }

    def _places(self, blocks: list[int], slots: list[int]) -> tuple[Numbers, Numbers]:
        """Returns the addresses of our layers' pages in these blocks, and of their places in these
        slots, in the same order."""
        cache = self._cache
        cache.check_block_ids(blocks)
        pages = np.concatenate([cache.addresses_of(int(layer), blocks) for layer in self._layers])
        start = int(self._memory.ctypes.data)
        first = start + self._slot_bytes * np.array(slots, np.int64)
        inside = cache.page_bytes * np.arange(len(self._layers))
        return pages, np.add.outer(inside, first).ravel()

    def _sizes(self, pages: Numbers) -> Numbers:
        return np.full(len(pages), self._cache.page_bytes)

    def _pinned(self) -> bool:
        try:
            self._cache.device.pin(self._memory)
        except KVTransferError as error:
            logger.warning("the host tier is off, because its memory cannot be pinned: %s", error)
            return False
        return True
