"""Does the work on requests so that it holds up nothing else in the event loop.

`run`    long bodies: beside the event loop, one piece after the other. A thread of its own takes
         turns with the event loop (`take_short_turns`). Many threads would take turns with each
         other first: so there is one, and long bodies wait for each other
`pause`  all others: in pieces of a few hundred microseconds, of which each turn of the event loop
         has one, and one more for each `_LINE` that wait, `_MOST` at most. Between two turns it
         reads and passes on what has come, tokens of running answers above all. Turns take long
         where the host is busy or many answers run: with one piece each, requests that are to be
         refused would wait for seconds, and their line would grow until they stop to come
         What is begun goes first: work on a request that a node has room for, or on the end of an
         answer, does not wait for all that have just come
`hold`   no such piece begins before `release`: while the tokens of a step are being passed on
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar
from weakref import WeakKeyDictionary

LONG_BODY = 16 << 10
"""Bytes. Work on what is shorter is over sooner than a thread begins."""

_SHORT_TURN_S = 0.0005
_LINE = 32
_MOST = 16
"""Pieces of a turn: some 3 ms of work, of the 5 ms that it may parse."""
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")
_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-bodies")


def take_short_turns() -> None:
    """Has threads of this process let each other go on ten times as often as Python's usual 5 ms:
    tokens that come while the thread works wait for no more. It costs the thread some 2 %."""
    sys.setswitchinterval(_SHORT_TURN_S)


async def run(is_long: bool, work: Callable[[], _Result]) -> _Result:
    """Returns what `work` does. Long work is done in the thread, in the caller's context."""
    if not is_long:
        return work()
    context = copy_context()
    return await asyncio.get_running_loop().run_in_executor(_worker, context.run, work)


async def pause(*, is_begun: bool = False) -> None:
    """Returns in a later turn of the event loop, which has few other pieces. `is_begun`: before all
    that are not, because somewhere room is taken until this piece is done."""
    await _turns_here().wait(is_begun=is_begun)


async def in_pieces(items: Sequence[_Item], size: int = 64) -> AsyncIterator[_Item]:
    """Yields all items, and pauses after each `size` of them."""
    for start in range(0, len(items), size):
        if start:
            await pause()
        for item in items[start : start + size]:
            yield item


def hold() -> None:
    """Lets no piece begin in the running event loop until `release`. Repeating it changes nothing.
    What takes long has to release it from time to time."""
    _turns_here().hold()


def release() -> None:
    """Takes `hold` back, if there was one."""
    _turns_here().release()


class _Turns:
    """The turns of one event loop. Pieces of a kind have the order in which they were asked for."""

    def __init__(self) -> None:
        self._num_taken = 0
        """Pieces of the next turn that have not begun."""
        self._is_held = False
        self._begun: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()

    async def wait(self, *, is_begun: bool) -> None:
        """Returns when it is the caller's turn."""
        if self._num_taken or self._is_held:
            await self._wait_in_line(self._begun if is_begun else self._others)
        else:
            self._num_taken = 1
            try:
                await asyncio.sleep(0)
            except BaseException:
                self._pass_on()
                raise
        self._pass_on()

    def hold(self) -> None:
        self._is_held = True

    def release(self) -> None:
        self._is_held = False
        if not self._num_taken:
            self._fill_turn()

    async def _wait_in_line(self, line: deque[asyncio.Future[None]]) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(turn)
        try:
            await turn
        except BaseException:
            if not turn.cancel() and not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Gives the turn behind this one to the next in line, if this piece is its last."""
        self._num_taken -= 1
        if not (self._num_taken or self._is_held):
            self._fill_turn()

    def _fill_turn(self) -> None:
        room = min(1 + (len(self._begun) + len(self._others)) // _LINE, _MOST)
        for line in (self._begun, self._others):
            while line and self._num_taken < room:
                turn = line.popleft()
                if not turn.done():
                    turn.set_result(None)
                    self._num_taken += 1


def _turns_here() -> _Turns:
    loop = asyncio.get_running_loop()
    turns = _turns.get(loop)
    if turns is None:
        turns = _turns[loop] = _Turns()
    return turns


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()
