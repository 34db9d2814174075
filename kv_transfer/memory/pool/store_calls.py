"""Calls of the store tier beside the event loop: a thread for each connection that reads, one that
compares what they have brought, and one that writes.

    read    piece 0  get ──▶ check
            piece 1  get ──────▶ check         (another connection)
            piece 2            get ──▶ check

A call may hang for half a minute where a process of the store is frozen. So a connection that is
not there is made in the writers' thread and not waited for, and the threads do not keep this
process from ending.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from kv_transfer.errors import KVTransferError
from kv_transfer.memory.pool.block_store import BlockStore, StoreAway, StoreMissing, pieces

T = TypeVar("T")

_AGAIN_S = 5.0
"""Pause between two tries to connect."""

logger = logging.getLogger(__name__)


class StoreCalls:
    """`lost` is called, in the event loop, when the library cannot be used at all."""

    def __init__(self, store: BlockStore, lost: Callable[[str], None]) -> None:
        self._store = store
        self._lost = lost
        self._reads = _Threads("store reads", store.num_connections)
        self._checks, self._writes = _Threads("store checks"), _Threads("store writes")
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        told = False
        while True:
            try:
                await self._writes.run(self._store.connect)
            except StoreMissing as error:
                self._lost(str(error))
                return
            except StoreAway as error:
                if not told:
                    logger.warning("KV in the store tier is away: %s", error)
                told = True
                await asyncio.sleep(_AGAIN_S)
            else:
                logger.info("the store tier is connected")
                return

    async def find(self, names: Sequence[bytes], *, is_chain: bool) -> list[int]:
        """Returns nothing where the store cannot be asked."""
        find = partial(self._store.find, names, is_chain=is_chain)
        return await self._or(list[int](), self._reads, find)

    async def read(self, names: Sequence[bytes], slots: Sequence[int]) -> list[int]:
        """Returns the slots whose blocks did not come."""
        found = await asyncio.gather(*map(self._read_piece, pieces(names, slots)))
        return [slot for failed in found for slot in failed]

    async def _read_piece(self, piece: Sequence[tuple[bytes, int]]) -> list[int]:
        brought = await self._or(None, self._reads, self._store.get, piece)
        if brought is None:
            return [slot for _, slot in piece]
        failed = await self._or(None, self._checks, self._store.check, brought)
        return [slot for _, slot in piece] if failed is None else failed

    async def write(self, slots: Sequence[int]) -> list[int]:
        """Returns the slots whose blocks the store did not take."""
        return await self._or(list(slots), self._writes, self._store.write, slots)

    async def _or(self, missed: T, thread: _Threads, call: Callable[..., T], *args: Any) -> T:
        if not self._store.is_connected:
            return missed
        try:
            return await thread.run(call, *args)
        except KVTransferError:
            return missed

    def close(self) -> None:
        """Ends; a call that hangs is left alone."""
        self._connecting.cancel()
        all_threads = (self._reads, self._checks, self._writes)
        if all(threads.is_idle for threads in all_threads):
            self._store.close()
        for threads in all_threads:
            threads.end()


class _Threads:
    """Runs calls in their order, in `count` threads that the interpreter does not wait for."""

    def __init__(self, name: str, count: int = 1) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._num_open = 0
        self._count = count
        for _ in range(count):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return self._num_open == 0

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            self._num_open -= 1
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            result, error = None, None
            try:
                result = call(*args)
            except Exception as raised:
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        self._num_open += 1
        self._calls.put(work)
        return await done

    def end(self) -> None:
        for _ in range(self._count):
            self._calls.put(None)

    def _run(self) -> None:
        while (work := self._calls.get()) is not None:
            work()
