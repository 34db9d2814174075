"""Passes on what steps bring: first tokens before others, and a large step in slices.

A step has an output for each of its requests, and all of them are there at once. A slice is passed
on in one go, from the engine core's message to what is sent to clients. Between two slices the
event loop takes what has arrived, such as a first token of a prefill node: it does not wait for the
end of a step of some hundred rows. Work on requests does (`edge.http.event_loop.long_work`), for a
while: each piece between two slices would make all rows behind it late.

A node server that is slower than its engine falls behind. What a request has then from several
steps becomes one output of several tokens, which costs hardly more than one of a single token.

Behind the last slice of a step no token is due for some milliseconds: then garbage is collected.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from edge.http.event_loop import long_work
from edge.program import collect_early
from engine.contracts.messages import EngineCoreOutput

_SLICE_S = 0.001
_HOLD_S = 0.005
"""Steps that take longer to pass on let a piece of work in, each time."""


class Delivered(NamedTuple):
    """One message of outputs that has been passed on. CLOCK_MONOTONIC seconds: when the engine core
    sent it, when it was here, and when all of it was written to clients."""

    sent_at: float
    received_at: float
    written_at: float


class OutputDelivery:
    """Calls `deliver` with outputs, those of each request in order, and `note` with each message
    behind its last output."""

    def __init__(
        self,
        deliver: Callable[[EngineCoreOutput], None],
        note: Callable[[Delivered], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._note = note
        self._open: list[tuple[float, float]] = []
        """Holds when messages were sent and received of which something waits."""
        self._firsts: deque[EngineCoreOutput] = deque()
        self._others: dict[str, EngineCoreOutput] = {}
        """Holds what waits, by request id; what waits longest comes first."""
        self._is_scheduled = False
        self._held_since = 0.0
        """CLOCK_MONOTONIC seconds from which on work on requests waits; 0: it does not."""

    def take(self, outputs: Sequence[EngineCoreOutput], sent_at: float) -> None:
        """Takes the outputs of one message, and delivers the first slice of what is here."""
        if not outputs:
            return
        self._open.append((sent_at, time.monotonic()))
        for output in outputs:
            if output.prompt_logprobs is not None or output.group >= 0:
                self._deliver(output)  # They come before the first token.
            elif output.num_cached_tokens is not None:
                self._firsts.append(output)
            else:
                self._add(output)
        if not self._is_scheduled:
            self._deliver_slice()

    def flush(self) -> None:
        """Delivers everything now."""
        while self._firsts or self._others:
            self._deliver_next()

    def _add(self, output: EngineCoreOutput) -> None:
        name = output.request_id
        waiting = self._others.get(name)
        if waiting is None:
            self._others[name] = output
        elif output.new_token_ids:
            self._others[name] = _joined(waiting, output)
        else:
            # An end without a token says nothing of the last token before it.
            del self._others[name]
            self._deliver(waiting)
            self._others[name] = output

    def _deliver_slice(self) -> None:
        self._is_scheduled = False
        now = time.monotonic()
        until = now + _SLICE_S
        try:
            while self._firsts or self._others:
                self._deliver_next()
                if (now := time.monotonic()) >= until and (self._firsts or self._others):
                    self._go_on_later(now)
                    return
        except BaseException:
            self._go_on_later(now)  # Others wait behind it, and work on requests behind them.
            raise
        self._let_work_begin(0.0)
        for sent_at, received_at in self._open:
            self._note(Delivered(sent_at, received_at, now))
        self._open.clear()
        self._loop.call_soon(collect_early)  # Behind what has waited for this.

    def _go_on_later(self, now: float) -> None:
        self._is_scheduled = True
        self._loop.call_soon(self._deliver_slice)
        if not self._held_since:
            self._held_since = now
            long_work.hold()
        elif now - self._held_since < _HOLD_S:
            long_work.hold()
        else:
            self._let_work_begin(now)

    def _let_work_begin(self, now: float) -> None:
        if self._held_since:
            self._held_since = now
            long_work.release()

    def _deliver_next(self) -> None:
        if self._firsts:
            self._deliver(self._firsts.popleft())
        else:
            self._deliver(self._others.pop(next(iter(self._others))))


def _joined(first: EngineCoreOutput, more: EngineCoreOutput) -> EngineCoreOutput:
    """Returns two outputs of a request as one."""
    logprobs = None
    if first.logprobs is not None or more.logprobs is not None:
        logprobs = [*(first.logprobs or ()), *(more.logprobs or ())]
    return msgspec.structs.replace(
        first,
        new_token_ids=[*first.new_token_ids, *more.new_token_ids],
        logprobs=logprobs,
        finish_reason=more.finish_reason,
        stop_reason=more.stop_reason,
        error=more.error,
    )
