"""Reads the messages of one socket between processes of a node, and drops what nothing of ours
sent.

Names of sockets are visible on the host, and any process of the same user may write to them. What
cannot be read as a message is dropped and counted, so that junk costs a line in the log and not the
node. Processes of one node run the same release, so none of them sends what another cannot read.
"""

from __future__ import annotations

import logging
from typing import Any, Generic, TypeVar

import msgspec
import zmq

T = TypeVar("T")

logger = logging.getLogger(__name__)


class MessageReader(Generic[T]):
    """Takes messages of `kind` from `socket`; `name` is what the log calls their senders."""

    def __init__(self, socket: zmq.Socket[bytes], kind: Any, name: str) -> None:
        self.num_dropped = 0
        self._socket = socket
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._name = name

    def next(self) -> T | None:
        """Returns a message that has arrived, or None when there is none."""
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                return self._decoder.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self.drop(len(data))

    def drop(self, num_bytes: int) -> None:
        """Counts a message that cannot be from one of ours. The log learns of the first ones."""
        self.num_dropped += 1
        if self.num_dropped & (self.num_dropped - 1) == 0:
            logger.warning(
                "%d messages that are none were dropped where %s speaks, the last of %d bytes: "
                "another process of this user writes to sockets of this engine",
                self.num_dropped, self._name, num_bytes,
            )  # fmt: skip
