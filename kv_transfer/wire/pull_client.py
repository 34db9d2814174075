"""How a puller makes PullKV calls: behind one interface, so that the choice is a setting.

A client opens one connection for each stream in motion, so streams do not share a congestion
window, and keeps idle connections for the next transfer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import grpc

from kv_transfer.errors import (
    CorruptChunk,
    KVTransferError,
    NotServed,
    PeerLost,
    TransferTimeout,
)
from tandem_pb import kv_transfer_pb2 as pb

HEAD_BYTES = 64
"""A sink gets this many bytes of each message first, or all of it."""


class MessageSink(Protocol):
    """Takes the messages of a stream, one after the other."""

    def begin(self, head: bytes, num_bytes: int) -> list[memoryview]:
        """A message of `num_bytes` begins with `head`, its first 64 bytes (or all of it). Where
        the rest shall be written, exactly."""

    def fill(self, part: memoryview) -> None:
        """The next bytes of the rest are written; they are still in the processor's cache. Called
        in order, but perhaps by a thread; `begin` and `end` are called by the event loop alone."""

    def end(self) -> None:
        """The rest is there. What is raised ends the call."""


class PullClient(ABC):
    """All methods may be used by many streams at the same time."""

    @abstractmethod
    async def pull(
        self, address: str, slot: int, request: pb.PullRequest, sink: MessageSink
    ) -> None:
        """Makes one call: returns after a complete stream. Raises KVTransferError, or what `sink`
        raises. `slot` tells streams of one transfer apart. Cancelled, it writes nothing more."""

    @abstractmethod
    async def forget(self, addresses: set[str]) -> None:
        """The next calls to these addresses dial anew."""

    @abstractmethod
    async def close_idle(self, idle_s: float) -> None:
        """Closes connections that were not used for this long."""

    @abstractmethod
    async def close(self) -> None:
        """Calls in motion fail."""


def refusal(address: str, code: grpc.StatusCode, details: str) -> KVTransferError:
    """Returns what a status other than OK means for the transfer."""
    text = f"{address}: {code.name}: {details}"
    if code is grpc.StatusCode.DATA_LOSS:
        return CorruptChunk(text)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return NotServed(text)
    if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DEADLINE_EXCEEDED):
        return TransferTimeout(text)
    return PeerLost(text)
