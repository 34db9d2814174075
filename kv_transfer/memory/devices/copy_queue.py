"""Copies of one stream, and the waiters that get a notice when they are done. Lives on one event
loop.

    1. copies are issued on `stream`
    2. `then(callback)`    called once all copies issued before are done: at once on the host, from
                           the event loop on a device; `then_sometime`: a little later will do
    3. `await settled()`   all copies issued so far are done
    4. `close()`           waits for the stream

A device is asked again and again while copies are on their way: a few times in a row, because most
copies take less than the shortest sleep, then once every millisecond. A waiter for 3 has nothing
else to wait for, and what it copied may take some milliseconds, in which it does not sleep. Other
work of the loop goes on between any two looks. Other threads do not: beside a loop that never
sleeps, each waits 0.15 ms for Python's lock whenever it needs it. So nothing is looked at in a row
that nothing waits for.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from kv_transfer.memory.devices.copy_stream import CopyStream, Fence

_LOOKS_IN_A_ROW = 30
_LOOK_FOR_S = 0.005
_PAUSE_S = 0.001


class CopyQueue:
    """`on_error` is called for a device that failed: nothing it holds can be trusted any more."""

    def __init__(self, stream: CopyStream) -> None:
        self.stream = stream
        self.on_error: Callable[[BaseException], None] = _raise
        self._waiting: deque[tuple[Fence, Callable[[], None], bool]] = deque()
        """Fences, the waiters that are notified of them, and whether soon."""
        self._num_awaited = 0
        """This many of them want a notice soon."""
        self._is_urgent = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._settle_until = 0.0
        """Something is in a hurry until then."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def then(self, callback: Callable[[], None]) -> None:
        """Callbacks come in the order in which they were given."""
        self._add(callback, is_awaited=True)

    def then_sometime(self, callback: Callable[[], None]) -> None:
        """Calls it like `then`, in the same order, but nothing is in a hurry."""
        self._add(callback, is_awaited=False)

    def _add(self, callback: Callable[[], None], is_awaited: bool) -> None:
        fence = self.stream.fence()
        if not self._waiting and fence.is_done():
            callback()
            return
        self._waiting.append((fence, callback, is_awaited))
        if is_awaited and self._num_awaited == 0:
            self._is_urgent.set()
        self._num_awaited += is_awaited
        if self._poller is None or self._poller.done():
            self._poller = asyncio.get_running_loop().create_task(self._poll())

    async def settled(self) -> None:
        done = asyncio.Event()
        self.then(done.set)
        if not done.is_set():
            self.hurry()
            await done.wait()

    def hurry(self) -> None:
        """Looks without a pause for the next few milliseconds: something waits for nothing else."""
        self._settle_until = time.monotonic() + _LOOK_FOR_S
        self._is_urgent.set()

    def wait_for_oldest(self) -> bool:
        """Blocks until the first one in line can be called, and calls it. False: nothing waits.
        For when memory is short; the copies in question depend on nothing else."""
        if not self._waiting:
            return False
        self._waiting[0][0].wait()
        self._call_done()
        return True

    def close(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
        self.stream.close()

    async def _poll(self) -> None:
        looks = 0
        try:
            while self._waiting:
                looks = 0 if self._call_done() else looks + 1
                is_worth_it = self._num_awaited and looks < _LOOKS_IN_A_ROW
                if is_worth_it or time.monotonic() < self._settle_until:
                    await asyncio.sleep(0)
                elif await self._pause():
                    looks = 0
        except Exception as error:
            self.on_error(error)

    async def _pause(self) -> bool:
        """Returns whether it became urgent."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_PAUSE_S):
                await self._is_urgent.wait()
        was_urgent = self._is_urgent.is_set()
        self._is_urgent.clear()
        return was_urgent

    def _call_done(self) -> bool:
        """Returns whether anything was called."""
        was_any = False
        while self._waiting and self._waiting[0][0].is_done():
            was_any = True
            _, callback, is_awaited = self._waiting.popleft()
            self._num_awaited -= is_awaited
            callback()
        return was_any


def _raise(error: BaseException) -> None:
    raise error
