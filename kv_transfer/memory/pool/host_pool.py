"""The tiers behind the KV cache, as one transfer process has them: its share of each block.

    1. `HostPool`   takes memory, pinned where a GPU copies, and the folder of the disk tier
    2. `tell_contents`   what outlived a former life of this process
    3. `store`      blocks are copied to slots; then their checksums are computed, in a thread
       `spill`      slots are written to files
       `fetch`      files, or blocks of the store, are read to slots, whose checksums are compared
       `put`        slots are given to the store
       `load`       slots are copied to blocks, layer by layer; a layer is marked when its copies
                    are done and its checksums were right, so a step may compute with it
    4. `close`

Jobs answer with a `HostTierEvent` when nothing of them is on its way any more. A rank's
processes share each block: process i of n has layers i, i + n, ... of it. With fewer layers than
processes, as a stage of a pipeline may have, some have none, and agree to everything.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kv_transfer.errors import KVTransferError
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.devices.copy_queue import CopyQueue
from kv_transfer.memory.load_marks import LoadMarks
from kv_transfer.memory.pool.block_files import BlockFiles
from kv_transfer.memory.pool.block_header import identity_of
from kv_transfer.memory.pool.block_store import BlockStore
from kv_transfer.memory.pool.slot_checks import SlotChecks
from kv_transfer.memory.pool.slot_memory import SlotMemory, TierUnavailable
from kv_transfer.memory.pool.store_address import StoreAddress
from kv_transfer.memory.pool.store_calls import StoreCalls
from kv_transfer.memory.pool.store_parts import store_parts
from kv_transfer.tier import (
    AskMeta,
    DiskUnwritten,
    FetchMeta,
    ForgetMeta,
    HostTierEvent,
    LoadBegun,
    LoadMeta,
    PutMeta,
    SpillMeta,
    StoreFound,
    StoreMeta,
    Tier,
    TierCommand,
    TierContents,
    TierEvent,
    TierJob,
    TierOff,
)

T = TypeVar("T")

_PORTION_BYTES = 1 << 20
"""Limits what moves at once: pages of 512 KiB by pairs reach 40 GB/s on an H200, one by one 37. The
p99 of the time between tokens of rows beside it stayed below that without loads."""
_LAYERS_AHEAD = 3
"""Layers of a load whose copies a device has been given and has not done."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """One process's part of the tiers.

    Attributes:
        num_slots: Blocks in host memory.
        share: (number of this process, processes of its rank).
        first_layer: Of the model's layers, the first that this rank has.
        process, generation: Of this process, in its events.
        check_threads: That compare checksums of loads.
        memory_path: Folder for the memory, if it shall outlive this process. None: it does not.
        disk_path: Folder of the disk tier. None: there is none.
        store: The store behind it. None: there is none.
        store_host: Where its processes reach this one.
    """

    num_slots: int
    share: tuple[int, int]
    process: int
    first_layer: int = 0
    generation: int = 0
    check_threads: int = 1
    memory_path: Path | None = None
    disk_path: Path | None = None
    store: StoreAddress | None = None
    store_host: str = "127.0.0.1"


class HostPool:
    """`emit` takes events."""

    def __init__(
        self, cache: KVCacheView, config: PoolConfig, emit: Callable[[TierEvent], None]
    ) -> None:
        """Takes memory and files, or says in `contents` why a tier is off."""
        self._cache = cache
        self._config = config
        self._emit = emit
        index, count = config.share
        num_layers = cache.layout.block_bytes // cache.page_bytes
        self._layers = list(range(index, num_layers, count))
        self._off: dict[Tier, str] = {}
        self._files: BlockFiles | None = None
        self._store_calls: StoreCalls | None = None
        self._memory = self._take_memory()
        self._checks = SlotChecks(self._memory, config.check_threads)
        self._threads = {job: ThreadPoolExecutor(1, job) for job in ("checksums", "files")}
        self._jobs: set[asyncio.Task[None]] = set()
        self._copies = CopyQueue(cache.device.new_stream())
        self._copies.stream.portion_bytes = _PORTION_BYTES
        self._copies.on_error = lambda error: cache.copies.on_error(error)
        self._in_order = asyncio.Lock()
        """Loads are verified and marked one behind the other."""
        self._marks: LoadMarks | None = None
        handle = cache.handle
        if handle.load_marks_fd >= 0:
            self._marks = LoadMarks.attach(handle.pid, handle.load_marks_fd, num_layers)

    async def close(self) -> None:
        """Ends without a word; no job begins any more."""
        await self._copies.settled()
        if self._files is not None:
            self._files.stop_scan()
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        self._checks.close()
        if self._store_calls is not None:
            self._store_calls.close()
        for thread in self._threads.values():
            thread.shutdown()
        self._copies.close()
        self._memory.close()
        if self._files is not None:
            self._files.close()

    async def tell_contents(self, patience_s: float) -> None:
        """Tells what is here at the start. That takes a look at each file of the disk tier, and
        this returns after `patience_s` at the latest: peers shall not wait for a large disk."""
        telling = asyncio.create_task(self._tell_contents())
        self._jobs.add(telling)
        telling.add_done_callback(self._ended)
        await asyncio.wait([telling], timeout=patience_s)

    async def _tell_contents(self) -> None:
        self._emit(await self._in_thread("files", self.contents))

    def contents(self) -> TierContents:
        """Returns what is here at the start. Looks at each file of the disk tier."""
        files = self._scan(self._files) if self._files is not None else []
        return TierContents(
            self._config.process,
            self._config.generation,
            self._memory.contents() if Tier.HOST not in self._off else {},
            files,
            self._files.num_damaged if self._files is not None else 0,
            dict(self._off),
        )

    def _scan(self, files: BlockFiles) -> list[bytes]:
        """Returns the blocks that `files` has; of a disk that cannot be listed none is used."""
        try:
            return files.scan()
        except OSError as error:
            self._off[Tier.DISK] = f"its files cannot be listed: {error}"
            return []

    def handle(self, command: TierCommand) -> None:
        match command:
            case StoreMeta():
                self._begin(command, self._store(command))
            case LoadMeta():
                self._begin(command, self._load(command))
            case SpillMeta():
                self._begin(command, self._spill(command))
            case FetchMeta(tier=Tier.STORE):
                self._begin(command, self._fetch_from_store(command))
            case FetchMeta():
                self._begin(command, self._fetch(command, self._reads(command)))
            case PutMeta():
                self._begin(command, self._put(command))
            case AskMeta():
                self._begin(None, self._ask(command))
            case ForgetMeta():
                self._forget(command)

    # Jobs -------------------------------------------------------------------------------------

    async def _store(self, meta: StoreMeta) -> None:
        memory = self._memory
        for slot in meta.slots:
            memory.clear(slot)
        for place, layer in enumerate(self._layers):
            self._copy(meta, place, layer, to_host=True)
        await self._copies.settled()
        for slot, name in zip(meta.slots, meta.names, strict=True):
            memory.put(slot, name, await self._in_thread("checksums", memory.checksums, slot))
        self._end(meta, [])

    async def _load(self, meta: LoadMeta) -> None:
        memory = self._memory
        damaged = {slot for slot in meta.slots if memory.name_of(slot) is None}
        if not damaged and not self._layers:
            self._has_begun(meta)
        elif not damaged:
            async with self._in_order:
                damaged = await self._load_layers(meta)
        if damaged:
            logger.error("%d blocks of the host tier are damaged, and not used", len(damaged))
        self._end(meta, sorted(damaged))

    async def _load_layers(self, meta: LoadMeta) -> set[int]:
        """Returns slots that are damaged."""
        layers, damaged = self._layers, set[int]()
        checks = self._checks.begin(meta.slots)
        # The device shall not wait until we have seen that it is done.
        ahead = 1 if self._cache.device.copies_at_once else _LAYERS_AHEAD
        copied: deque[asyncio.Future[None]] = deque()
        for place in range(-ahead, len(layers)):
            if place + ahead < len(layers):
                self._copy(meta, place + ahead, layers[place + ahead])
                copied.append(self._copied())
            if place >= 0:
                damaged |= await checks.wrong_in(place)
                if place + 1 == len(layers):
                    self._copies.hurry()
                await copied.popleft()
                if not damaged:
                    self._mark(meta, place, layers[place])
        return damaged

    async def _spill(self, meta: SpillMeta) -> None:
        files, failed, fault = self._files, list[int](), ""
        for slot in meta.slots:
            if files is None or Tier.DISK in self._off or fault:
                failed.append(slot)
                continue
            try:
                if not await self._in_thread("files", files.write, slot):
                    failed.append(slot)
            except OSError as error:
                failed.append(slot)
                fault = str(error)
        if fault:
            self._emit(DiskUnwritten(self._config.process, fault))
        self._answer(meta, failed)

    def _reads(self, meta: FetchMeta) -> list[asyncio.Future[bool]]:
        """Begins all reads at once: files that are to be removed from now on are read before."""
        if self._files is None:
            return []
        read, thread = self._files.read, self._threads["files"]
        asked = zip(meta.names, meta.slots, strict=True)
        return [asyncio.wrap_future(thread.submit(read, name, slot)) for name, slot in asked]

    async def _fetch(self, meta: FetchMeta, reads: list[asyncio.Future[bool]]) -> None:
        are_right = await asyncio.gather(*reads) or [False] * len(meta.slots)
        failed = [s for s, is_right in zip(meta.slots, are_right, strict=True) if not is_right]
        self._end(meta, failed)

    async def _fetch_from_store(self, meta: FetchMeta) -> None:
        store, failed = self._store_calls, meta.slots
        if store is not None:
            failed = await store.read(meta.names, meta.slots)
        self._end(meta, failed)

    async def _put(self, meta: PutMeta) -> None:
        store = self._store_calls
        self._answer(meta, await store.write(meta.slots) if store is not None else meta.slots)

    async def _ask(self, meta: AskMeta) -> None:
        store = self._store_calls
        found = [] if store is None else await store.find(meta.names, is_chain=meta.is_chain)
        self._emit(StoreFound(meta.job, self._config.process, found))

    def _forget(self, meta: ForgetMeta) -> None:
        files, thread = self._files, self._threads["files"]
        if meta.names is None:
            self._memory.clear_all()
            if files is not None:
                thread.submit(files.remove_all)
        elif files is not None:
            for name in meta.names:
                thread.submit(files.remove, name)

    # Their parts ------------------------------------------------------------------------------

    def _begin(self, meta: TierJob | None, job: asyncio._CoroutineLike[None]) -> None:
        if Tier.HOST in self._off and meta is not None:
            job.close()
            self._answer(meta, meta.slots)
            return
        task = asyncio.get_running_loop().create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None:
            self._cache.copies.on_error(error)

    def _end(self, meta: TierJob, damaged: list[int]) -> None:
        """Answers; what is damaged is forgotten."""
        for slot in damaged:
            self._memory.clear(slot)
        self._answer(meta, damaged)

    def _answer(self, meta: TierJob, damaged: list[int]) -> None:
        self._emit(HostTierEvent(meta.job, self._config.process, damaged))

    def _mark(self, meta: LoadMeta, place: int, layer: int) -> None:
        if meta.ticket is None or self._marks is None:
            return
        self._marks.write(meta.ticket, layer)
        if place == 0:
            self._has_begun(meta)

    def _has_begun(self, meta: LoadMeta) -> None:
        if meta.ticket is not None:
            self._emit(LoadBegun(meta.job, self._config.process))

    def _copy(
        self, meta: StoreMeta | LoadMeta, place: int, layer: int, to_host: bool = False
    ) -> None:
        """Issues the copies of a layer, the `place`-th of ours."""
        cache = self._cache
        cache.check_block_ids(meta.blocks)
        pages = cache.addresses_of(layer, meta.blocks)
        slots = self._memory.addresses(meta.slots, place)
        sizes = np.full(len(pages), cache.page_bytes)
        targets, sources = (slots, pages) if to_host else (pages, slots)
        self._copies.stream.copy(targets, sources, sizes, in_portions=True)

    def _copied(self) -> asyncio.Future[None]:
        """Returns what is done when all copies are that were issued so far."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def set_done() -> None:
            if not done.cancelled():
                done.set_result(None)

        self._copies.then(set_done)
        return done

    async def _in_thread(self, thread: str, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads[thread], call, *args)

    # What there is to be had ------------------------------------------------------------------

    def _take_memory(self) -> SlotMemory:
        config, page = self._config, self._cache.page_bytes
        try:
            memory = self._mapped()
            self._cache.device.pin(memory.data)
        except TierUnavailable as error:
            self._off[Tier.HOST] = str(error)
        except KVTransferError as error:
            memory.close()
            self._off[Tier.HOST] = f"its memory cannot be pinned: {error}"
        else:
            if config.disk_path is not None:
                self._take_files(memory, config.disk_path)
            if config.store is not None and self._layers:
                layout, rank = self._cache.layout, self._cache.handle.rank
                parts = store_parts(layout, rank, config.first_layer, config.share, memory)
                store = BlockStore(config.store, config.store_host, parts, memory)
                self._store_calls = StoreCalls(store, partial(self._turn_off, Tier.STORE))
            return memory
        return SlotMemory.anonymous(0, len(self._layers), page)

    def _mapped(self) -> SlotMemory:
        config = self._config
        shape = config.num_slots, len(self._layers), self._cache.page_bytes
        if config.memory_path is None:
            return SlotMemory.anonymous(*shape)
        path = config.memory_path / f"{self._share_name}.slots"
        return SlotMemory.at(path, self._identity, *shape)

    def _take_files(self, memory: SlotMemory, path: Path) -> None:
        identity = self._identity
        folder = path / identity.hex()[:16] / self._share_name
        try:
            self._files = BlockFiles(folder, identity, memory)
        except TierUnavailable as error:
            self._off[Tier.DISK] = str(error)

    @property
    def _share_name(self) -> str:
        index, count = self._config.share
        return f"rank{self._cache.handle.rank}-{index}of{count}"

    @property
    def _identity(self) -> bytes:
        config, cache = self._config, self._cache
        return identity_of(cache.layout, cache.handle.rank, config.first_layer, config.share)

    def _turn_off(self, tier: Tier, why: str) -> None:
        if tier not in self._off:
            self._off[tier] = why
            self._emit(TierOff(self._config.process, tier, why))
