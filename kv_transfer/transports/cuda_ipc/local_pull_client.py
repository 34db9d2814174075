"""The consumer's end of local calls (`local_frames`), to one transfer process of a peer.

1. `pull`   over a connection that nothing uses, or a new one, whose other end must be the process
            that the address names, under our user
2. the call ends, and its connection serves the next; one that is cancelled, or breaks, is closed
3. a process that cannot be reached locally, or hangs up on a new connection without a word, is
   called over the network from then on
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket

import grpc

from kv_transfer.errors import PeerLost
from kv_transfer.transports.cuda_ipc.local_frames import (
    MAX_MESSAGE_BYTES,
    FrameError,
    FrameReader,
    LocalAddress,
    LocalFrame,
    frame,
    parse_end,
    peer_of,
)
from kv_transfer.wire.pull_client import HEAD_BYTES, MessageSink, PullClient, refusal
from tandem_pb import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)


class LocalPullClient(PullClient):
    """As many connections as there were calls at the same time. `network` carries calls to a
    process that cannot be reached locally."""

    def __init__(self, local: LocalAddress, network: PullClient) -> None:
        self._local = local
        self._network = network
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._num_calls = 0
        self._is_hopeless = False

    @property
    def is_unused(self) -> bool:
        """Returns whether nothing is lost when it is forgotten."""
        return self._num_calls == 0 and self.num_connections == 0

    @property
    def num_connections(self) -> int:
        return sum(one.is_usable for one in self._idle) + len(self._busy)

    async def pull(
        self, address: str, slot: int, request: pb.PullRequest, sink: MessageSink
    ) -> None:
        self._num_calls += 1
        try:
            connection = self._reuse() or await self._connect(address)
            if connection is None or not await self._call(connection, address, request, sink):
                await self._network.pull(address, slot, request, sink)
        finally:
            self._num_calls -= 1

    async def _call(
        self, connection: _Connection, address: str, request: pb.PullRequest, sink: MessageSink
    ) -> bool:
        """Returns False if it must be made over the network."""
        self._busy.add(connection)
        try:
            code, details = await connection.call(self._local.key, request, sink)
        except ConnectionError as error:
            if not connection.has_answer:
                self._give_up(address, str(error))
                return False
            raise PeerLost(f"{address}: the local connection broke: {error}") from error
        finally:
            self._busy.discard(connection)
            if connection.is_usable:
                self._idle.append(connection)
        if code is not grpc.StatusCode.OK:
            raise refusal(address, code, details)
        return True

    async def forget(self, addresses: set[str]) -> None:
        """A process that has ended took its connections with it; the others can still be used."""
        return

    async def close_idle(self, idle_s: float) -> None:
        """A connection costs nothing while it is idle."""
        return

    async def close(self) -> None:
        self.close_connections()

    def close_connections(self) -> None:
        """Calls in motion fail."""
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()

    def _reuse(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
        return None

    async def _connect(self, address: str) -> _Connection | None:
        """Returns None for a process that cannot be reached, or is another than it should be."""
        if self._is_hopeless:
            return None
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_unix_connection(_Connection, self._local.path)
        except (OSError, ValueError) as error:
            self._give_up(address, str(error))
            return None
        if connection.peer != (self._local.pid, os.getuid()):
            connection.close()
            self._give_up(address, f"(process, user) {connection.peer} listens there")
            return None
        return connection

    def _give_up(self, address: str, why: str) -> None:
        self._is_hopeless = True
        logger.warning("%s is on this host, but is called over the network: %s", address, why)


class _Connection(asyncio.Protocol):
    """One connection to a transfer process."""

    def __init__(self) -> None:
        self.peer = (0, 0)
        """Process and user at the other end."""
        self.has_answer = False
        """The other end has said anything."""
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(MAX_MESSAGE_BYTES)
        self._sink: MessageSink | None = None
        self._done: asyncio.Future[tuple[grpc.StatusCode, str]] | None = None

    @property
    def is_usable(self) -> bool:
        """Returns whether another call may be made."""
        is_open = self._transport is not None and not self._transport.is_closing()
        return is_open and self._done is None

    async def call(
        self, key: bytes, request: pb.PullRequest, sink: MessageSink
    ) -> tuple[grpc.StatusCode, str]:
        """Returns how the call ended. Raises ConnectionError, or whatever `sink` raised."""
        if self._transport is None:
            raise ConnectionError("it has ended")
        done: asyncio.Future[tuple[grpc.StatusCode, str]]
        self._done = done = asyncio.get_running_loop().create_future()
        self._sink = sink
        self._transport.write(frame(LocalFrame.CALL, key + request.SerializeToString()))
        try:
            return await done
        except BaseException:
            self.close()
            raise
        finally:
            self._done = self._sink = None

    def close(self) -> None:
        """Closes at once: nothing is written into memory any more. Idempotent."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    # As asyncio's protocol --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock: socket.socket = transport.get_extra_info("socket")
        self.peer = peer_of(sock)

    def data_received(self, data: bytes) -> None:
        self.has_answer = True
        try:
            for kind, payload in self._reader.feed(data):
                self._on_frame(kind, payload)
        except FrameError as error:
            self._fail(ConnectionError(str(error)))
        except Exception as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._fail(error or ConnectionError("closed by it"))

    def _on_frame(self, kind: LocalFrame, payload: bytes) -> None:
        if kind is LocalFrame.PING and self._transport is not None:
            self._transport.write(frame(LocalFrame.PONG))
        elif kind is LocalFrame.MESSAGE and self._sink is not None:
            _deliver(payload, self._sink)
        elif kind is LocalFrame.END and self._done is not None and not self._done.done():
            self._sink = None
            self._done.set_result(parse_end(payload))
        elif self._done is not None or kind is not LocalFrame.PING:
            raise FrameError(f"a frame {kind.name} where none belongs")

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()


def _deliver(message: bytes, sink: MessageSink) -> None:
    """Hands a whole message over."""
    views = sink.begin(message[:HEAD_BYTES], len(message))
    at = min(HEAD_BYTES, len(message))
    for view in views:
        view[:] = message[at : at + len(view)]
        at += len(view)
        sink.fill(view)
    sink.end()
