"""Broadcast of messages to the workers: short ones through the ring, long ones over ZeroMQ.

A payload larger than a slot is pushed to each reader over a socket of its own, and the ring
carries a marker (size and checksum) in its place; so both kinds keep one order, and a slow
reader holds the writer back in both. Nothing is lost: a full ring makes `enqueue` wait.

Waiting is a short spin, then sleep on a futex. Every sleeper looks from time to time whether the
other side still lives (`check_alive` raises when it does not).
"""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections.abc import Callable

import msgspec
import zmq

from engine.executor.queues.shm_broadcast import Place, RingError, RingHandle, ShmRingBuffer
from host.sockets.local_socket import Context, bind_socket, connect_socket

logger = logging.getLogger(__name__)

_LIVENESS_INTERVAL_S = 1.0
_SPIN_S = 50e-6
_LOST_AFTER_S = 20.0
"""A long message is on its way before it is announced."""
_TORN_LIMIT_S = 1.0
"""A message that stays unreadable for this long is broken, not late."""


class MessageQueueHandle(msgspec.Struct, frozen=True, kw_only=True, tag="ring"):
    """Names a queue; `overflow_addresses[reader]` is where that reader receives long messages."""

    ring: RingHandle
    overflow_addresses: list[str]


class MessageQueueWriter:
    """The one writer. Sequence numbers start at 1."""

    def __init__(
        self,
        context: Context,
        name: str,
        overflow_addresses: list[str],
        check_alive: Callable[[], None],
        *,
        num_slots: int = 16,
        slot_bytes: int = 1 << 16,
    ) -> None:
        self._ring = ShmRingBuffer.create(name, len(overflow_addresses), num_slots, slot_bytes)
        self._sockets = [
            connect_socket(context, zmq.PUSH, address) for address in overflow_addresses
        ]
        self._check_alive = check_alive
        self.handle = MessageQueueHandle(
            ring=self._ring.handle, overflow_addresses=overflow_addresses
        )
        self.sequence = 0
        """The sequence number of the last message sent."""

    def enqueue(self, message: bytes) -> None:
        """Sends to all readers; waits while the slowest one is a whole ring behind."""
        sequence = self.sequence + 1
        self._wait_for_slot(sequence)
        if len(message) <= self._ring.handle.slot_bytes:
            self._ring.publish(sequence, message, Place.SLOT)
        else:
            for socket in self._sockets:
                socket.send(message)
            marker = msgspec.msgpack.encode((len(message), zlib.crc32(message)))
            self._ring.publish(sequence, marker, Place.SOCKET)
        self.sequence = sequence

    def num_unread(self, reader: int) -> int:
        """Messages that `reader` has not taken yet."""
        return self._ring.num_unread(reader, self.sequence)

    def _wait_for_slot(self, sequence: int) -> None:
        while (reader := self._ring.slowest_reader(sequence)) is not None:
            word = self._ring.acknowledged[reader]
            seen = word.value
            if self._ring.slowest_reader(sequence) == reader:
                word.wait(seen, _LIVENESS_INTERVAL_S)
                self._check_alive()

    def close(self) -> None:
        """Readers see no end of the stream: tell them before. Idempotent."""
        for socket in self._sockets:
            socket.close(linger=0)
        self._ring.close()


class MessageQueueReader:
    """Reader number `reader`. Sees every message from the first on, however late it attaches."""

    def __init__(
        self,
        context: Context,
        handle: MessageQueueHandle,
        reader: int,
        check_alive: Callable[[], None],
    ) -> None:
        self._ring = ShmRingBuffer.attach(handle.ring)
        self._socket = bind_socket(context, zmq.PULL, handle.overflow_addresses[reader])
        self._reader = reader
        self._check_alive = check_alive
        self.sequence = 0
        """The sequence number of the last message taken."""

    def dequeue(self, timeout_s: float | None = None) -> bytes | None:
        """Returns the next message; None when none came within `timeout_s`. Raises RingError when
        messages were lost or one is broken.
        """
        found = self._wait_for(self.sequence + 1, timeout_s)
        if found is None:
            return None
        payload, place = found
        if place is Place.SOCKET:
            payload = self._receive_long(payload)
        self.sequence += 1
        self._ring.acknowledge(self._reader, self.sequence)
        return payload

    def _wait_for(self, sequence: int, timeout_s: float | None) -> tuple[bytes, Place] | None:
        started = now = time.monotonic()
        deadline = float("inf") if timeout_s is None else started + timeout_s
        while True:
            seen = self._ring.published.value
            found = self._ring.read(sequence)
            if found is not None:
                return found
            if seen != (sequence - 1) & 0xFFFFFFFF:
                self._check_not_torn(sequence)
            elif now >= deadline:
                return None
            elif now - started < _SPIN_S:
                os.sched_yield()
            else:
                limit = min(_LIVENESS_INTERVAL_S, deadline - now)
                self._ring.published.wait(seen, limit)
                self._check_alive()
            now = time.monotonic()

    def _check_not_torn(self, sequence: int) -> None:
        """Raises if an announced message stays unreadable: it is complete within nanoseconds, or
        never.
        """
        deadline = time.monotonic() + _TORN_LIMIT_S
        while self._ring.read(sequence) is None:
            if time.monotonic() > deadline:
                raise RingError(f"message {sequence} was announced and is lost or broken")

    def _receive_long(self, marker: bytes) -> bytes:
        size, crc = msgspec.msgpack.decode(marker, type=tuple[int, int])
        deadline = time.monotonic() + _LOST_AFTER_S
        while time.monotonic() < deadline:
            if not self._socket.poll(int(_LIVENESS_INTERVAL_S * 1000)):
                self._check_alive()
                continue
            message = self._socket.recv()
            if len(message) == size and zlib.crc32(message) == crc:
                return message
            logger.warning("%d bytes that were not announced were dropped", len(message))
        raise RingError(f"message {self.sequence + 1} of {size} bytes was announced and is lost")

    def close(self) -> None:
        """Closes the queue. Idempotent."""
        self._socket.close(linger=0)
        self._ring.close()
