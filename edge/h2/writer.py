"""Sends for one server connection: frames, cut from messages as flow control allows.

call 1   [message][message]      `_fill` cuts frames, as far as windows  ┐
call 3   [message][trailers]     and the peer's frame size allow         ├─▶ `_out` ─▶ socket
control  PING, SETTINGS ...      at once                                 ┘

The call that has least to send comes first: a short prompt's KV does not wait for a long one's, and
of equal ones the first is complete when half of the time has passed, not both at its end. A call
that has waited for half a second comes before all others, so none falls silent; as long as the path
takes more than one frame of each in that time, those that wait share a part of it.

1. little is written at once, on the event loop
2. much goes to a sending thread; nothing else is written until it is done
3. a full socket: on when the event loop sees room
4. `close`: what is not sent is dropped
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Protocol

from edge.h2 import frames as h2
from edge.h2.out_message import Buffer, OutMessage
from edge.h2.send_pace import SendPace
from edge.h2.send_threads import Connection, SendThreads, Sent, send_now

_LONGEST_WAIT_S = 0.5
_UNSENT_BYTES = 0x894B
"""SIOCOUTQNSD of linux/sockios.h."""
_SMALL_BYTES = 32 << 10
_MAX_BUFFERS = 512
_MAX_CONTROL_BYTES = 64 << 10
"""Answers to a peer that asks and does not read."""


class Segment:
    """Bytes in their final order: `head`, then [start, stop) of a message."""

    __slots__ = ("head", "message", "sent", "size", "start", "stop")

    def __init__(
        self, head: bytes, message: OutMessage | None = None, start: int = 0, stop: int = 0
    ) -> None:
        self.head = head
        self.message = message
        self.start = start
        self.stop = stop
        self.size = len(head) + stop - start
        self.sent = 0

    def buffers(self) -> Iterator[Buffer]:
        """Yields what is not sent yet."""
        if self.sent < len(self.head):
            yield memoryview(self.head)[self.sent :]
        if self.message is not None:
            done = max(0, self.sent - len(self.head))
            yield from self.message.slices(self.start + done, self.stop)


class Source(Protocol):
    """A call that has something to send."""

    @property
    def has_more(self) -> bool: ...
    @property
    def bytes_left(self) -> int:
        """Returns about how much it will send until its end."""

    def next_segment(self, limit: int) -> Segment | None:
        """Returns at most `limit` bytes of payload. None: nothing that may be sent now."""

    def was_sent(self, segment: Segment) -> None: ...


def _ignore(error: Exception) -> None:
    return


def _limit_unsent(sock: Connection, num_bytes: int) -> None:
    with suppress(OSError):  # Not every socket is one of TCP.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, num_bytes)


class H2Writer:
    """`on_lost` is called once, with the reason, when the socket can take nothing more."""

    def __init__(
        self, sock: Connection, threads: SendThreads, on_lost: Callable[[Exception], None]
    ) -> None:
        self.max_frame_bytes = h2.DEFAULT_FRAME_BYTES
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self._threads = threads
        self._on_lost = on_lost
        self._window = h2.DEFAULT_WINDOW
        self._pace = SendPace(partial(_limit_unsent, sock))
        self._sources: dict[Source, float] = {}
        """When each was served last, or came."""
        self._out: deque[tuple[Segment, Source | None]] = deque()
        self._out_bytes = 0
        self._control_bytes = 0
        self._in_thread: list[OutMessage] = []
        self._thread_bytes = 0
        self._is_waiting = False
        self._is_closed = False

    @property
    def is_amid_frame(self) -> bool:
        """Returns whether nothing but the rest of a frame may be sent now."""
        return self._thread_bytes > 0 or bool(self._out and self._out[0][0].sent)

    def control(self, data: bytes) -> None:
        """Raises `H2Error` when the peer makes us talk and does not listen."""
        self.queue_control(data)
        self.pump()

    def queue_control(self, data: bytes) -> None:
        """Nothing is sent before the next `pump`: what is cut from then on comes behind `data`."""
        self._control_bytes += len(data)
        if self._control_bytes > _MAX_CONTROL_BYTES:
            raise h2.H2Error("too much to answer", h2.ErrorCode.ENHANCE_YOUR_CALM)
        self._push(Segment(data), None)

    def add(self, source: Source) -> None:
        """It has something to send. No harm if that is known."""
        self._sources.setdefault(source, self._loop.time())
        self.pump()

    def remove(self, source: Source) -> None:
        """Removes the source. What was cut is sent all the same."""
        self._sources.pop(source, None)

    def grow_window(self, num_bytes: int) -> None:
        self._window += num_bytes
        if self._window > h2.MAX_WINDOW:
            raise h2.H2Error("the window is too large", h2.ErrorCode.FLOW_CONTROL_ERROR)

    def pump(self) -> None:
        """Sends what can be sent."""
        while not (self._thread_bytes or self._is_waiting or self._is_closed):
            self._fill()
            if not self._out:
                return
            self._send()

    def close(self) -> None:
        """Closes it. Idempotent. The socket is closed when no thread uses it any more."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_waiting:
            self._loop.remove_writer(self._socket.fileno())
        for message in {id(s.message): s.message for s, _ in self._out if s.message}.values():
            message.dropped()
        self._out.clear()
        # Its owner gets no more events. Without this the two would wait for the garbage collector,
        # which comes seldom, and peers that come and go would fill the memory.
        self._on_lost = _ignore
        if not self._thread_bytes:
            self._socket.close()

    # Cutting ----------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Fills until no call has anything that it may send now. A frame once begun must be
        finished: on a slow path they are short."""
        limit = self.max_frame_bytes
        if self._pace.is_bounded:
            limit = min(limit, self._pace.ahead)
        now, idle = self._loop.time(), set[Source]()
        while self._out_bytes < self._pace.ahead and (source := self._next(idle, now)):
            segment = source.next_segment(min(self._window, limit))
            if not source.has_more:
                del self._sources[source]
            elif segment is None:
                idle.add(source)
            if segment is not None:
                if source in self._sources:
                    self._sources[source] = now
                self._window -= segment.stop - segment.start
                self._push(segment, source)

    def _next(self, idle: set[Source], now: float) -> Source | None:
        waiting = [source for source in self._sources if source not in idle]
        if len(waiting) < 2:
            return waiting[0] if waiting else None
        longest = min(waiting, key=self._sources.__getitem__)
        if now - self._sources[longest] > _LONGEST_WAIT_S:
            return longest
        return min(waiting, key=lambda source: source.bytes_left)

    def _push(self, segment: Segment, source: Source | None) -> None:
        self._out.append((segment, source))
        self._out_bytes += segment.size

    # Sending ----------------------------------------------------------------------------------

    def _send(self) -> None:
        buffers: list[Buffer] = []
        messages: list[OutMessage] = []
        num_bytes = 0
        for segment, _ in self._out:
            room = _MAX_BUFFERS - len(buffers)
            part = list(islice(segment.buffers(), room))
            buffers += part
            num_bytes += sum(len(buffer) for buffer in part)
            if segment.message is not None:
                messages.append(segment.message)
            if len(part) == room:
                break
        if num_bytes <= _SMALL_BYTES:
            for message in messages:
                message.complete()
            self._after(send_now(self._socket, buffers), num_bytes)
            return
        for message in messages:
            message.begin_read()
        self._in_thread, self._thread_bytes = messages, num_bytes
        self._threads.send(self._socket, buffers, messages, self._thread_is_done)

    def _thread_is_done(self, result: Sent) -> None:
        messages, self._in_thread = self._in_thread, []
        num_bytes, self._thread_bytes = self._thread_bytes, 0
        for message in messages:
            message.end_read()
        if self._is_closed:
            self._socket.close()
            return
        self._after(result, num_bytes)
        self.pump()

    def _after(self, result: Sent, num_bytes: int) -> None:
        if isinstance(result, OSError):
            self._on_lost(result)
            return
        is_full = result < num_bytes
        has_more = bool(self._sources) or len(self._out) > 1
        self._pace.sent(result, self._loop.time(), is_full=is_full, has_more=has_more)
        if is_full:
            self._is_waiting = True
            self._loop.add_writer(self._socket.fileno(), self._has_room)
        self._advance(result)

    def _has_room(self) -> None:
        self._loop.remove_writer(self._socket.fileno())
        self._is_waiting = False
        if not self._num_unsent():
            self._pace.ran_dry()
        self.pump()

    def _num_unsent(self) -> int:
        """Returns the bytes that wait in the kernel; 1 where it does not say."""
        try:
            told = fcntl.ioctl(self._socket.fileno(), _UNSENT_BYTES, bytes(4))
        except OSError:
            return 1
        return int.from_bytes(told, sys.byteorder)

    def _advance(self, num_bytes: int) -> None:
        self._out_bytes -= num_bytes
        while num_bytes:
            segment, source = self._out[0]
            count = min(num_bytes, segment.size - segment.sent)
            segment.sent += count
            num_bytes -= count
            if segment.sent == segment.size:
                self._out.popleft()
                if source is not None:
                    source.was_sent(segment)
                else:
                    self._control_bytes -= segment.size
