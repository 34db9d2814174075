"""PullKV calls that grpcio carries."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import grpc
import grpc.aio

from edge.security.credentials import Credentials
from kv_transfer.wire.channels import ChannelPool
from kv_transfer.wire.pull_client import HEAD_BYTES, MessageSink, PullClient, refusal
from kv_transfer.wire.service_paths import PULL_PATH
from tandem_pb import kv_transfer_pb2 as pb


class GrpcPullClient(PullClient):
    """One channel, and so one connection, for each slot of an address."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._channels = ChannelPool(credentials)

    async def pull(
        self, address: str, slot: int, request: pb.PullRequest, sink: MessageSink
    ) -> None:
        channel = await self._channels.get(address, slot)
        call: grpc.aio.UnaryStreamMultiCallable[pb.PullRequest, bytes] = channel.unary_stream(
            PULL_PATH, request_serializer=pb.PullRequest.SerializeToString
        )
        try:
            answers = call(request, metadata=self._credentials.metadata())
            # Closed, because it and the call hold each other while it is not at its end.
            async with aclosing(cast("AsyncGenerator[bytes, None]", aiter(answers))) as messages:
                async for message in messages:
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
