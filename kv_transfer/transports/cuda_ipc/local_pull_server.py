"""The producer's end of local calls: PullKV without a network in between.

1. `listen`   on an abstract socket with a name that nothing can guess; `address` goes to pullers
              of this host with the handshake
2. a connection is of a process of our user, or closed at once
3. a call     is answered by the same method that the network's calls are
4. a connection that ends, however its process ended, cancels its call; one on which nothing was
   received for long is asked, and given up if it does not answer
5. `close`
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import time
from collections.abc import Mapping
from typing import NoReturn

import grpc
from google.protobuf.message import DecodeError

from edge.h2.out_message import OutMessage
from edge.h2.rpc_method import RpcMethod, ServerCall
from edge.standstill import sleep_and_see
from kv_transfer.transports.cuda_ipc.local_frames import (
    KEY_BYTES,
    MAX_REQUEST_BYTES,
    FrameError,
    FrameReader,
    LocalAddress,
    LocalFrame,
    end_payload,
    frame,
    peer_of,
)

_BACKLOG = 512
_MAX_CONNECTIONS = 1024
_CHECK_S = 2.5
_PING_AFTER_S = 10.0
_GIVE_UP_AFTER_S = 25.0

logger = logging.getLogger(__name__)


class _Refused(Exception):
    """A handler refuses to go on."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class LocalPullServer:
    """Answers calls of `method`. A puller that is silent for `ping_after_s` is asked whether it
    lives, and left after `give_up_after_s`."""

    def __init__(
        self,
        method: RpcMethod,
        ping_after_s: float = _PING_AFTER_S,
        give_up_after_s: float = _GIVE_UP_AFTER_S,
    ) -> None:
        self.method = method
        self.address = LocalAddress.new()
        self._patience_s = ping_after_s, give_up_after_s
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._check: asyncio.Task[None] | None = None

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def listen(self) -> None:
        """Raises OSError where there are no such sockets."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _Connection(self), self.address.path, backlog=_BACKLOG
        )
        self._check = loop.create_task(self._check_forever())

    async def close(self) -> None:
        """Calls in motion are cancelled. Idempotent."""
        if self._server is not None:
            self._server.close()
        if self._check is not None:
            self._check.cancel()
        for connection in list(self._connections):
            connection.close()

    def admit(self, connection: _Connection) -> bool:
        """Returns whether there is room for one more."""
        if len(self._connections) >= _MAX_CONNECTIONS:
            return False
        self._connections.add(connection)
        return True

    def forget(self, connection: _Connection) -> None:
        self._connections.discard(connection)

    async def _check_forever(self) -> None:
        ping_after_s, give_up_after_s = self._patience_s
        pause_s = min(_CHECK_S, ping_after_s / 2)
        while True:
            late_s = await sleep_and_see(pause_s)
            for connection in list(self._connections):
                connection.extend_silence_deadline(late_s)
                connection.check_alive(ping_after_s, give_up_after_s)


class _Connection(asyncio.Protocol):
    """One puller's connection."""

    def __init__(self, server: LocalPullServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(KEY_BYTES + MAX_REQUEST_BYTES)
        self._task: asyncio.Task[None] | None = None
        self._last_read_at = time.monotonic()
        self._has_room = asyncio.Event()
        self._has_room.set()

    # As asyncio's protocol --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        sock: socket.socket = transport.get_extra_info("socket")
        if peer_of(sock)[1] != os.getuid() or not self._server.admit(self):
            transport.abort()
            return
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._last_read_at = time.monotonic()
        try:
            for kind, payload in self._reader.feed(data):
                self._on_frame(kind, payload)
        except FrameError as error:
            logger.warning("a local connection is closed: %s", error)
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._server.forget(self)
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self._has_room.set()

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    # What the server and its calls need -------------------------------------------------------

    def extend_silence_deadline(self, seconds: float) -> None:
        """This process stalled: that time does not count against the peer."""
        self._last_read_at += seconds

    def check_alive(self, ping_after_s: float, give_up_after_s: float) -> None:
        """Asks a puller that is silent, and leaves one that does not answer."""
        silence = time.monotonic() - self._last_read_at
        if silence > give_up_after_s:
            self.close()
        elif silence > ping_after_s:
            self.send(LocalFrame.PING)

    def send(self, kind: LocalFrame, payload: bytes = b"") -> bool:
        """Returns False when nothing is there any more."""
        if self._transport is None or self._transport.is_closing():
            return False
        self._transport.write(frame(kind, payload))
        return True

    async def room(self) -> None:
        """Waits until the puller reads what was written."""
        await self._has_room.wait()

    def close(self) -> None:
        """Closes at once. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    def _on_frame(self, kind: LocalFrame, payload: bytes) -> None:
        if kind is LocalFrame.PONG:
            return
        if kind is not LocalFrame.CALL or self._task is not None:
            raise FrameError(f"a frame {kind.name} where none belongs")
        if not hmac.compare_digest(payload[:KEY_BYTES], self._server.address.key):
            raise FrameError("a call without our key")
        self._task = asyncio.create_task(self._answer(payload[KEY_BYTES:]))

    async def _answer(self, request: bytes) -> None:
        method, status = self._server.method, end_payload(grpc.StatusCode.OK, "")
        try:
            await method.handle(method.parse(request), _LocalCall(self))
        except _Refused as refusal:
            status = end_payload(refusal.code, refusal.details)
        except DecodeError:
            status = end_payload(grpc.StatusCode.INTERNAL, "the request cannot be read")
        except Exception:
            logger.exception("a local call failed unexpectedly")
            details = "the call failed unexpectedly; the log says why"
            status = end_payload(grpc.StatusCode.UNKNOWN, details)
        # The puller may call again as soon as it has read this.
        self._task = None
        self.send(LocalFrame.END, status)


class _LocalCall(ServerCall):
    """A call that came over a local connection."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    async def write(self, message: OutMessage) -> None:
        is_sent = False
        try:
            await self._connection.room()
            is_sent = self._connection.send(LocalFrame.MESSAGE, message.joined())
        finally:
            message.sent() if is_sent else message.dropped()

    @property
    def headers(self) -> Mapping[str, str]:
        return {}

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise _Refused(code, details)
