"""A prefill node's side of the `Prefixes` service: asks a peer what it holds of a prompt.

1. `ask`      one short call. Whatever goes wrong, nothing is pulled: the prompt is computed. Of
              many channels those are closed that nothing is asked over
2. avoided    a peer that could not be reached, for a while: no prompt waits for it. The next
              question goes over a new connection, since networks lose some and tell neither end
3. `close`
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

import grpc

from edge.grpc_answers import GarbledAnswer, QuietChannel, readable, words_of
from edge.security.config import PlaintextRefused, Role
from edge.security.credentials import Credentials
from edge.security.renewed_channel import RenewedChannel
from engine.contracts.messages import PrefixAsk
from engine.contracts.prefix_holder import HashChains, PrefixHolder
from engine.frontend.calls.prefix_calls import PeerAnswer
from engine.node.prefix_servicer import chains_to_proto
from kv_transfer.errors import HandshakeMismatch, PeerLost
from kv_transfer.metadata import KVPeer, KVTransferParams, is_transfer_id
from kv_transfer.wire.handshake import check_endpoints, peer_from_proto, peer_to_proto
from tandem_pb import prefixes_pb2, prefixes_pb2_grpc

logger = logging.getLogger(__name__)

_TIMEOUT_S = 1.0
_AVOID_S = 5.0
_MAX_PEERS = 256
_NO_ANSWER = (GarbledAnswer, HandshakeMismatch, PeerLost, PlaintextRefused, ValueError)
_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


class PrefixClient:
    """Talks to all peers. `us` tells what peers learn of this node."""

    def __init__(self, us: Callable[[], KVPeer], credentials: Credentials) -> None:
        self._us = us
        self._credentials = credentials
        self._channels: OrderedDict[PrefixHolder, RenewedChannel] = OrderedDict()
        self._num_open: Counter[PrefixHolder] = Counter()
        """Questions that have no answer yet."""
        self._avoid_until: dict[PrefixHolder, float] = {}

    async def ask(self, ask: PrefixAsk) -> PeerAnswer:
        """Returns what to pull; nothing if the peer has nothing, is not there or does not fit."""
        holder = PrefixHolder.parse(ask.peer)
        if holder is None or time.monotonic() < self._avoid_until.get(holder, 0.0):
            return None, 0
        self._num_open[holder] += 1
        try:
            return await self._offer(holder, ask.chains)
        except grpc.aio.AioRpcError as error:
            why = words_of(error)
        except _NO_ANSWER as error:
            why = str(error)
        finally:
            self._num_open[holder] -= 1
            if not self._num_open[holder]:
                del self._num_open[holder]
        self._avoid(holder)
        logger.warning("%s gives no prefixes for %g s: %s", ask.peer, _AVOID_S, why)
        if holder not in self._num_open and (channel := self._channels.pop(holder, None)):
            await channel.close()
        return None, 0

    async def close(self) -> None:
        channels, self._channels = self._channels, OrderedDict()
        await asyncio.gather(*(channel.close() for channel in channels.values()))

    def _avoid(self, holder: PrefixHolder) -> None:
        """Notes that a peer is not asked for a while; of others, whose time is over, nothing stays:
        they may be gone for good."""
        now = time.monotonic()
        self._avoid_until = {one: at for one, at in self._avoid_until.items() if at > now}
        self._avoid_until[holder] = now + _AVOID_S

    async def _offer(self, holder: PrefixHolder, chains: HashChains) -> PeerAnswer:
        channel = await (await self._channel(holder)).get()
        us = self._us()
        stub = prefixes_pb2_grpc.PrefixesStub(  # type: ignore[no-untyped-call]
            QuietChannel(channel)
        )
        answer: prefixes_pb2.OfferReply | None = await stub.Offer(
            prefixes_pb2.OfferRequest(asker=peer_to_proto(us), chains=chains_to_proto(chains)),
            timeout=_TIMEOUT_S,
            metadata=self._credentials.metadata(),
        )
        reply = readable(answer)
        if not reply.num_tokens:
            return None, 0
        peer = peer_from_proto(reply.holder, is_decode=holder.is_decode)
        us.layout.check_compatible(peer.layout)
        check_endpoints(peer)
        ours = {one.engine_id for one in (us, *us.groups)}
        if peer.engine_id in ours or not is_transfer_id(reply.transfer_id):
            raise ValueError("it is this node itself, or no node of ours")
        if peer.layout.draft_hash != us.layout.draft_hash:
            raise ValueError("it has another drafter, whose KV of the prefix would be missing")
        params = KVTransferParams(
            do_remote_prefill=True, transfer_id=reply.transfer_id, peer=peer, is_prefix=True
        )
        return params, reply.num_tokens

    async def _channel(self, holder: PrefixHolder) -> RenewedChannel:
        known = self._channels.get(holder)
        if known is None:
            role = Role.DECODE if holder.is_decode else Role.PREFILL
            address = holder.address
            known = self._channels[holder] = RenewedChannel(
                lambda: self._credentials.channel(address, role, _OPTIONS),
                address,
                self._credentials,
            )
            await self._close_idle()
        self._channels.move_to_end(holder)
        return known

    async def _close_idle(self) -> None:
        """Closes the channels that were not asked over for longest, beyond `_MAX_PEERS`."""
        num_more = len(self._channels) - _MAX_PEERS
        idle = [one for one in self._channels if one not in self._num_open][: max(0, num_more)]
        closed = [self._channels.pop(holder) for holder in idle]
        await asyncio.gather(*(channel.close() for channel in closed))
