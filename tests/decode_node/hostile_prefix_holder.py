"""A peer that offers prefixes of KV which it does not have, in every wrong way.

`lie` changes what `Offer` answers. Its transfer process is whatever listens at `kv_address`: one
that says nothing, one that says nonsense, or nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from tandem_pb import kv_transfer_pb2 as kv
from tandem_pb import prefixes_pb2, prefixes_pb2_grpc

MOST = (1 << 32) - 1
Lie = Callable[[prefixes_pb2.OfferReply], None]


class HostilePrefixHolder(prefixes_pb2_grpc.PrefixesServicer):
    """Fits whoever asks, but for its lie. `num_answered` counts what was told."""

    def __init__(self, lie: Lie, kv_address: str) -> None:
        self._lie = lie
        self.kv_address = kv_address
        self.num_answered = 0
        self.address = ""

    async def Offer(self, request: prefixes_pb2.OfferRequest, context: Any) -> Any:
        holder = kv.KVPeer()
        holder.CopyFrom(request.asker)
        holder.engine_id, holder.epoch = "liar", 7
        for rank in holder.ranks:
            del rank.addresses[:]
            rank.addresses.append(self.kv_address)
        [chain] = request.chains
        num_tokens = chain.block_size * len(chain.hashes)
        reply = prefixes_pb2.OfferReply(holder=holder, transfer_id="ab" * 16, num_tokens=num_tokens)
        self._lie(reply)
        self.num_answered += 1
        return reply

    @classmethod
    @asynccontextmanager
    async def listen(cls, lie: Lie, answer: bytes) -> AsyncIterator[HostilePrefixHolder]:
        """Serves offers; `answer` is what its transfer process says to whoever connects."""

        async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                writer.write(answer)
                while await reader.read(1 << 16):
                    pass
            writer.close()

        transfer = await asyncio.start_server(say, "127.0.0.1", 0)
        liar = cls(lie, f"127.0.0.1:{transfer.sockets[0].getsockname()[1]}")
        server = grpc.aio.server()
        prefixes_pb2_grpc.add_PrefixesServicer_to_server(liar, server)
        liar.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield liar
        finally:
            await server.stop(0)
            transfer.close()


def _tokens_without_end(reply: prefixes_pb2.OfferReply) -> None:
    reply.num_tokens = MOST


def _no_transfer(reply: prefixes_pb2.OfferReply) -> None:
    reply.transfer_id = "../../etc/passwd"


def _another_model(reply: prefixes_pb2.OfferReply) -> None:
    reply.holder.layout.model_hash = "\x1b[2J" * 1000


def _ranks_without_end(reply: prefixes_pb2.OfferReply) -> None:
    reply.holder.layout.tp_size = MOST


def _groups_without_end(reply: prefixes_pb2.OfferReply) -> None:
    for _ in range(5000):
        reply.holder.groups.add(engine_id="x")


def _nowhere(reply: prefixes_pb2.OfferReply) -> None:
    reply.holder.ranks[0].addresses[0] = "127.0.0.1:1"


def _no_address(reply: prefixes_pb2.OfferReply) -> None:
    reply.holder.ranks[0].addresses[0] = "unix:/etc/passwd"


def _nothing(reply: prefixes_pb2.OfferReply) -> None:
    """Leaves it to the transfer process to lie."""


LIES: tuple[tuple[Lie, bytes], ...] = (
    (_no_transfer, b""), (_another_model, b""), (_ranks_without_end, b""),
    (_groups_without_end, b""), (_nowhere, b""), (_no_address, b""), (_tokens_without_end, b""),
    (_nothing, b"HTTP/1.1 200 OK\r\n\r\n"), (_nothing, bytes(4096)),
)  # fmt: skip
