"""Consumer: short calls to the transfer processes of peers.

1. `handshake`  before the first pull from a process, and again after it was lost
2. `release`    when a transfer is over, whatever came of it
3. `forget`     after a peer was lost: the next attempt begins with a new handshake
"""

from __future__ import annotations

import logging

import grpc
import grpc.aio

from edge.grpc_answers import GarbledAnswer, QuietChannel, readable, words_of
from edge.security.credentials import Credentials, idle_channel
from kv_transfer.errors import PeerLost
from kv_transfer.metadata import KVPeer, ReleaseMeta
from kv_transfer.wire.channels import CONTROL, ChannelPool, new_channel
from kv_transfer.wire.handshake import (
    check_peer,
    host_id,
    peer_from_proto,
    peer_to_proto,
)
from kv_transfer.wire.service_paths import SERVICE
from tandem_pb import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 15.0
_LEAST_HANDSHAKE_S = 5.0
"""A handshake opens a connection and may wake a process: a limit for silence between chunks, which
follow each other, may be far too short for it."""


class PeerClient:
    """`me` is this node, as peers shall know it; `credentials` what it shows them. Handshakes that
    take longer than `timeout_s`, or 5 s if that is more, fail."""

    def __init__(self, me: KVPeer, timeout_s: float, credentials: Credentials) -> None:
        self._credentials = credentials
        self._channels = ChannelPool(credentials)
        self._idle: grpc.aio.Channel | None = None
        """Is open from the first handshake on, also if no other is."""
        self._me = me
        self._timeout_s = max(timeout_s, _LEAST_HANDSHAKE_S)
        self._known: dict[tuple[str, str, int], dict[int, bytes]] = {}
        """Keeps, by (address, engine id, epoch) of processes that answered as they should, what
        they said of each transport over which we can have their KV."""

    def transports_of(self, peer: KVPeer, address: str) -> dict[int, bytes]:
        """Returns what the process there said of its transports in the handshake."""
        return self._known.get((address, peer.engine_id, peer.epoch), {})

    def knows(self, peer: KVPeer, address: str) -> bool:
        return (address, peer.engine_id, peer.epoch) in self._known

    async def handshake(self, peer: KVPeer, address: str) -> None:
        """Raises `PeerLost` or `HandshakeMismatch`."""
        # A channel of its own: one that has failed before would answer from its backoff.
        await self._credentials.meet(address)
        if self._idle is None:
            self._idle = idle_channel()
        async with new_channel(address, self._credentials) as channel:
            answer = await self._ask(channel, address)
        check_peer(self._me.layout, peer, peer_from_proto(answer))
        key = (address, peer.engine_id, peer.epoch)
        self._known[key] = {transport.id: transport.data for transport in answer.transports}

    async def release(self, address: str, meta: ReleaseMeta) -> None:
        """Waits a while for the peer; one that cannot be reached is left to its lease."""
        request = pb.ReleaseRequest(
            transfer_id=meta.transfer_id,
            attempt=meta.attempt,
            epoch=meta.peer.epoch,
            complete=meta.complete,
        )
        channel = await self._channels.get(address, CONTROL)
        release = QuietChannel(channel).unary_unary(
            f"/{SERVICE}/Release",
            request_serializer=pb.ReleaseRequest.SerializeToString,
            response_deserializer=pb.ReleaseReply.FromString,
        )
        # The peer's process may be starting again just now: without waiting for the channel to
        # be ready, the call would be refused from the backoff of an earlier one.
        try:
            readable(
                await release(
                    request,
                    timeout=_RELEASE_TIMEOUT_S,
                    wait_for_ready=True,
                    metadata=self._credentials.metadata(),
                )
            )
        except grpc.aio.AioRpcError:
            pass
        except GarbledAnswer as error:
            logger.warning("%s is left to its lease: %s", address, error)

    def forget(self, addresses: set[str]) -> None:
        self._known = {
            key: handle for key, handle in self._known.items() if key[0] not in addresses
        }

    async def close_idle(self, idle_s: float) -> None:
        await self._channels.close_idle(idle_s)

    async def close(self) -> None:
        await self._channels.close()
        if self._idle is not None:
            await self._idle.close()
            self._idle = None

    async def _ask(self, channel: grpc.aio.Channel, address: str) -> pb.KVPeer:
        handshake = QuietChannel(channel).unary_unary(
            f"/{SERVICE}/Handshake",
            request_serializer=pb.KVPeer.SerializeToString,
            response_deserializer=pb.KVPeer.FromString,
        )
        try:
            answer: pb.KVPeer | None = await handshake(
                self._introduction(),
                timeout=self._timeout_s,
                metadata=self._credentials.metadata(),
            )
            return readable(answer)
        except grpc.aio.AioRpcError as error:
            raise _lost(address, error) from error
        except GarbledAnswer as error:
            logger.warning("no KV from %s: %s", address, error)
            raise PeerLost(f"{address}: {error}") from error

    def _introduction(self) -> pb.KVPeer:
        message = peer_to_proto(self._me)
        message.host_id = host_id()
        return message


def _lost(address: str, error: grpc.aio.AioRpcError) -> PeerLost:
    return PeerLost(f"{address}: {words_of(error)}")
