"""The `Prefixes` service of a node: holds cached blocks for prefill nodes that will pull them."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import grpc

from edge.security.config import Role
from engine.contracts.errors import EngineCallTimeout, EngineDeadError
from engine.contracts.messages import EngineReady, PrefixOffered
from engine.node.status import NodeStatus
from kv_transfer.errors import HandshakeMismatch
from kv_transfer.wire.handshake import peer_from_proto, peer_to_proto
from tandem_pb import prefixes_pb2, prefixes_pb2_grpc

SERVICE_NAME = "tandem.v1.Prefixes"
CALLERS = {SERVICE_NAME: frozenset({Role.PREFILL})}
"""Roles of those who may pull prefixes."""
MAX_NAMES = 1 << 16
"""Limits one call; what is behind them is computed."""
_MAX_NAME_BYTES = 256

OfferContext: TypeAlias = "grpc.aio.ServicerContext[Any, prefixes_pb2.OfferReply]"


class OfferingCalls(Protocol):
    """The part of `PrefixCalls` that is needed here."""

    async def offer(self, names: list[bytes]) -> PrefixOffered: ...


class OfferingEngine(Protocol):
    """The part of `AsyncLLM` that is needed here."""

    @property
    def ready(self) -> EngineReady: ...
    @property
    def prefixes(self) -> OfferingCalls: ...


class PrefixServicer(prefixes_pb2_grpc.PrefixesServicer):
    """Serves one engine."""

    def __init__(self, engine: OfferingEngine, status: NodeStatus) -> None:
        self._engine = engine
        self._status = status

    async def Offer(
        self, request: prefixes_pb2.OfferRequest, context: OfferContext
    ) -> prefixes_pb2.OfferReply:
        if self._status.work.draining or self._status.fault():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this node is stopping")
        names = list(request.names)
        if len(names) > MAX_NAMES or any(len(name) > _MAX_NAME_BYTES for name in names):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "too many or too long names")
        peer = self._engine.ready.peer
        assert peer is not None, "a node that serves prefixes exchanges KV"
        try:
            peer.layout.check_compatible(peer_from_proto(request.asker).layout)
            offered = await self._engine.prefixes.offer(names)
        except HandshakeMismatch as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except (EngineCallTimeout, EngineDeadError) as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return prefixes_pb2.OfferReply(
            holder=peer_to_proto(peer.group(offered.group)),
            transfer_id=offered.transfer_id,
            num_blocks=offered.num_blocks,
        )
