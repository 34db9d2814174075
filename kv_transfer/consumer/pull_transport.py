"""How a puller makes PullKV calls: behind one interface, so that the choice is a setting.

Both transports open one connection for each stream in motion, so streams do not share a
congestion window, and keep idle connections for the next transfer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import grpc
import grpc.aio

from edge.security.credentials import Credentials
from kv_transfer.errors import CorruptChunk, KVTransferError, PeerLost, TransferTimeout
from kv_transfer.h2.connection import HEAD_BYTES, MessageSink
from kv_transfer.producer.pull_service import PULL_PATH
from kv_transfer.wire.channels import ChannelPool
from tandem_pb import kv_transfer_pb2 as pb


class PullTransport(ABC):
    """All methods may be used by many streams at the same time."""

    @abstractmethod
    async def pull(
        self, address: str, slot: int, request: pb.PullRequest, sink: MessageSink
    ) -> None:
        """One call: returns after a complete stream. Raises KVTransferError, or what `sink`
        raises. `slot` tells streams of one transfer apart. Cancelled, it writes nothing more."""

    @abstractmethod
    async def forget(self, addresses: set[str]) -> None:
        """The next calls to these addresses dial anew."""

    @abstractmethod
    async def close_idle(self, idle_s: float) -> None:
        """Closes connections that were not used for so long."""

    @abstractmethod
    async def close(self) -> None:
        """Calls in motion fail."""


class GrpcPullTransport(PullTransport):
    """grpcio on both ends."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._channels = ChannelPool(credentials)

    async def pull(
        self, address: str, slot: int, request: pb.PullRequest, sink: MessageSink
    ) -> None:
        call: grpc.aio.UnaryStreamMultiCallable[pb.PullRequest, bytes] = self._channels.get(
            address, slot
        ).unary_stream(PULL_PATH, request_serializer=pb.PullRequest.SerializeToString)
        try:
            async for message in call(request, metadata=self._credentials.metadata()):
                _give(message, sink)
        except grpc.aio.AioRpcError as error:
            raise refusal(address, error.code(), error.details() or "") from error

    async def forget(self, addresses: set[str]) -> None:
        for address in addresses:
            await self._channels.drop(address)

    async def close_idle(self, idle_s: float) -> None:
        await self._channels.close_idle(idle_s)

    async def close(self) -> None:
        await self._channels.close()


def _give(message: bytes, sink: MessageSink) -> None:
    data = memoryview(message)
    at = min(HEAD_BYTES, len(data))
    for view in sink.begin(bytes(data[:at]), len(data)):
        view[:] = data[at : at + len(view)]
        sink.fill(view)
        at += len(view)
    sink.end()


def refusal(address: str, code: grpc.StatusCode, details: str) -> KVTransferError:
    """What a status other than OK means for the transfer."""
    text = f"{address}: {code.name}: {details}"
    if code is grpc.StatusCode.DATA_LOSS:
        return CorruptChunk(text)
    if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DEADLINE_EXCEEDED):
        return TransferTimeout(text)
    return PeerLost(text)
