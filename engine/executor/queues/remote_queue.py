"""The message queue to workers on other hosts: the same promises as the ring, over TCP.

    writer                                         reader r
    1. listens; readers get its address             2. connects, acknowledges 0
    3. waits until every reader has
       acknowledged s - limit
    4. sends (s, message) to each  ──────────────▶ 5. takes it, checks that s follows
                                   ◀────────────── 6. acknowledges s

Every message goes out once for each reader, encrypted (`host.sockets.secure_socket`). ZeroMQ
connects again when a connection breaks, and what was on its way is lost then: the numbers tell,
and the reader ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import zmq

from host.sockets.local_socket import Context, new_socket
from host.sockets.secure_socket import LinkKey, connect_secure, listen

_LIVENESS_INTERVAL_S = 1.0
_NUMBER_BYTES = 8
_NOT_JOINED = -1


class LostMessageError(Exception):
    """A message did not arrive: this reader's state is not the writer's any more."""


class RemoteQueueHandle(msgspec.Struct, frozen=True, kw_only=True, tag="remote"):
    """Lets a process of another host read the queue."""

    address: str
    key: LinkKey


class RemoteQueueWriter:
    """The one writer, listening on `host`. Sequence numbers start at 1.

    Args:
        check_alive: Raises when the writer need not wait any more.
        max_unread: Messages that a reader may be behind.
    """

    def __init__(
        self,
        context: Context,
        host: str,
        key: LinkKey,
        num_readers: int,
        check_alive: Callable[[], None],
        *,
        max_unread: int = 16,
    ) -> None:
        self._socket = new_socket(context, zmq.ROUTER)
        self.handle = RemoteQueueHandle(address=listen(self._socket, host, key), key=key)
        self._acknowledged = {_identity(reader): _NOT_JOINED for reader in range(num_readers)}
        self._check_alive = check_alive
        self._max_unread = max_unread
        self.sequence = 0
        """The sequence number of the last message sent."""

    def enqueue(self, message: bytes) -> None:
        """Sends to all readers; waits while one has not joined or is too far behind."""
        sequence = self.sequence + 1
        self._take_acknowledgements()
        while min(self._acknowledged.values()) < max(0, sequence - self._max_unread):
            self._check_alive()
            self._socket.poll(int(_LIVENESS_INTERVAL_S * 1000))
            self._take_acknowledgements()
        number = sequence.to_bytes(_NUMBER_BYTES, "little")
        for identity in self._acknowledged:
            self._socket.send_multipart([identity, number, message])
        self.sequence = sequence

    def num_unread(self, reader: int) -> int:
        """Messages that `reader` is not known to have taken."""
        self._take_acknowledgements()
        return self.sequence - max(0, self._acknowledged[_identity(reader)])

    def _take_acknowledgements(self) -> None:
        while self._socket.poll(0):
            identity, number = self._socket.recv_multipart()
            if identity in self._acknowledged:
                self._acknowledged[identity] = int.from_bytes(number, "little")

    def close(self) -> None:
        """Closes the writer's end; what was sent may still leave. Readers see no end of the stream:
        tell them before. Idempotent.
        """
        self._socket.close()


class RemoteQueueReader:
    """Reader number `reader`. Sees every message from the first on, or raises LostMessageError."""

    def __init__(
        self,
        context: Context,
        handle: RemoteQueueHandle,
        reader: int,
        check_alive: Callable[[], None],
    ) -> None:
        self._socket = connect_secure(
            context, zmq.DEALER, handle.address, handle.key, _identity(reader)
        )
        self._check_alive = check_alive
        self.sequence = 0
        """The sequence number of the last message taken."""
        self._acknowledge()

    def dequeue(self, timeout_s: float | None = None) -> bytes | None:
        """Returns the next message; None when none came within `timeout_s`."""
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not self._socket.poll(self._patience_ms(deadline)):
            if time.monotonic() >= deadline:
                return None
            self._check_alive()
        number, message = self._socket.recv_multipart()
        sequence = int.from_bytes(number, "little")
        if sequence != self.sequence + 1:
            raise LostMessageError(
                f"expected message {self.sequence + 1}, found {sequence}: the connection to the "
                f"engine core broke and messages were lost"
            )
        self.sequence = sequence
        self._acknowledge()
        return message

    @staticmethod
    def _patience_ms(deadline: float) -> int:
        left = min(_LIVENESS_INTERVAL_S, deadline - time.monotonic())
        return max(0, int(left * 1000) + 1)

    def _acknowledge(self) -> None:
        self._socket.send(self.sequence.to_bytes(_NUMBER_BYTES, "little"))

    def close(self) -> None:
        """Closes the reader's end. Idempotent."""
        self._socket.close(linger=0)


def _identity(reader: int) -> bytes:
    """Returns an identity that is unique among the readers of a queue. ZeroMQ reserves names that
    begin with a zero byte.
    """
    return b"reader %d" % reader
