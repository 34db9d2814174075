"""One gRPC call, as the server sees it.

    1. HEADERS name the method; DATA make up the request, END_STREAM ends it
    2. the handler runs as a task; `write` queues messages, at most two at a time
    3. `end`: trailers with the status follow what was written
    4. or `cancel`: the peer has reset the call, or the connection is gone

Messages are cut into frames by the connection's `H2Writer`, which asks for them in turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import NoReturn

import grpc

from edge.h2 import frames as h2
from edge.h2.out_message import OutMessage
from edge.h2.rpc_method import RpcMethod, ServerCall
from edge.h2.writer import H2Writer, Segment

_DEPTH = 2
"""Messages that are not sent: one on its way, one ready to follow."""
_PREFIX_BYTES = 5


class CallAborted(Exception):
    """A handler refuses to go on."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class H2Call(ServerCall):
    """One call on one stream of a server connection.

    `window`: what the peer lets us send on this stream at first. `on_over` is called when the
    handler has ended and nothing is left to send.
    """

    def __init__(
        self,
        stream: int,
        method: RpcMethod,
        headers: Mapping[str, str],
        writer: H2Writer,
        window: int,
        on_over: Callable[[H2Call], None],
    ) -> None:
        self.stream = stream
        self.method = method
        self._headers = headers
        self.has_ended = False
        """Trailers are queued, or nothing wants them."""
        self._on_over = on_over
        self.has_started = False
        self._task: asyncio.Task[None] | None = None
        """Is gone when it has ended: a cancelled one holds its frames, which hold this."""
        self._writer = writer
        self._window = window
        self._request = bytearray()
        self._has_answered = False
        self._queue: deque[OutMessage | bytes] = deque()
        """Messages to cut, and finished header frames between them."""
        self._num_cut = 0
        """Wire bytes of the first message of the queue that are in frames already."""
        self._queued_bytes = 0
        self._num_unsent = 0
        self._room = asyncio.Event()

    @property
    def headers(self) -> Mapping[str, str]:
        return self._headers

    # The request ------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Takes a piece of the request. Raises `H2Error` when it grows too long."""
        self._request += data
        if len(self._request) > self.method.max_request_bytes:
            raise h2.H2Error("a request is too long", h2.ErrorCode.ENHANCE_YOUR_CALM)

    def request(self) -> bytes:
        """Returns the one message of a complete request. Raises `CallAborted` if it is none."""
        data = bytes(self._request)
        if len(data) < _PREFIX_BYTES or len(data) != _PREFIX_BYTES + int.from_bytes(data[1:5]):
            raise CallAborted(grpc.StatusCode.INTERNAL, "the request is not one message")
        if data[0]:
            raise CallAborted(grpc.StatusCode.UNIMPLEMENTED, "compression is not supported")
        return data[_PREFIX_BYTES:]

    def start(self, run: Coroutine[None, None, None]) -> None:
        """The request is complete; `run` answers it."""
        self.has_started = True
        self._task = asyncio.create_task(run)
        self._task.add_done_callback(self._handler_ended)

    # What handlers use ------------------------------------------------------------------------

    async def write(self, message: OutMessage) -> None:
        if self.has_ended:
            message.dropped()
            return
        if not self._has_answered:
            self._has_answered = True
            self._queue.append(h2.headers(self.stream, h2.RESPONSE_FIELDS))
        self._queue.append(message)
        self._queued_bytes += message.num_wire_bytes
        self._num_unsent += 1
        self._writer.add(self)
        while self._num_unsent >= _DEPTH:
            self._room.clear()
            await self._room.wait()

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise CallAborted(code, details)

    # The end ----------------------------------------------------------------------------------

    def end(self, status: grpc.StatusCode, details: str) -> None:
        """Ends the call. With an error, messages that are not begun are dropped."""
        if self.has_ended:
            return
        self.has_ended = True
        if status is not grpc.StatusCode.OK:
            self._drop(keep_begun=True)
        code: int = status.value[0]
        is_first = not self._has_answered
        self._queue.append(h2.trailers(self.stream, code, details, is_first=is_first))
        self._writer.add(self)

    def cancel(self) -> None:
        """Nothing listens any more. Idempotent."""
        self.has_ended = True
        self._writer.remove(self)
        self._drop(keep_begun=False)
        self._queue.clear()
        if self._task is not None:
            self._task.cancel()
        self._look_whether_over()

    def _handler_ended(self, _: asyncio.Task[None]) -> None:
        self._task = None
        self._look_whether_over()

    def _look_whether_over(self) -> None:
        if self.has_ended and not self._queue and self._task is None:
            self._on_over(self)

    def _drop(self, keep_begun: bool) -> None:
        """Drops all messages but the one that is in frames already, if that is to be kept."""
        queue, self._queue = self._queue, deque()
        for i, item in enumerate(queue):
            if isinstance(item, bytes) or (i == 0 and self._num_cut and keep_begun):
                self._queue.append(item)
            else:
                self._num_unsent -= 1
                self._queued_bytes -= item.num_wire_bytes
                item.dropped()

    # What the writer asks ---------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        return bool(self._queue)

    @property
    def bytes_left(self) -> int:
        """Returns what is queued and what the handler says will follow."""
        return self.bytes_to_come + self._queued_bytes - self._num_cut

    def next_segment(self, limit: int) -> Segment | None:
        if not self._queue:
            return None
        item = self._queue[0]
        if isinstance(item, bytes):
            self._queue.popleft()
            return Segment(item)
        start = self._num_cut
        stop = min(item.num_wire_bytes, start + min(limit, self._window))
        if stop <= start:
            return None
        self._window -= stop - start
        self._num_cut = stop
        if stop == item.num_wire_bytes:
            self._queue.popleft()
            self._queued_bytes -= stop
            self._num_cut = 0
        head = h2.frame_header(stop - start, h2.FrameKind.DATA, 0, self.stream)
        return Segment(head, item, start, stop)

    def was_sent(self, segment: Segment) -> None:
        message = segment.message
        if message is None:
            self._look_whether_over()
        elif segment.stop == message.num_wire_bytes:
            self._num_unsent -= 1
            self._room.set()
            message.sent()

    def grow_window(self, num_bytes: int) -> None:
        """Changes the window from the writer's next `pump` on. May be negative: the peer has
        changed the window of all streams."""
        self._window += num_bytes
        if self._window > h2.MAX_WINDOW:
            raise h2.H2Error("a window is too large", h2.ErrorCode.FLOW_CONTROL_ERROR)
