"""The `Prefixes` service of a node: holds cached blocks for prefill nodes that will pull them."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import grpc

from edge.security.config import Role
from engine.contracts.errors import EngineCallTimeout, EngineDeadError
from engine.contracts.messages import EngineReady, PrefixOffered
from engine.contracts.prefix_holder import HashChains
from engine.kv_cache.groups import chain_sizes
from engine.node.status import NodeStatus
from kv_transfer.errors import HandshakeMismatch
from kv_transfer.layout import KVLayout
from kv_transfer.wire.handshake import peer_from_proto, peer_to_proto
from tandem_pb import prefixes_pb2, prefixes_pb2_grpc

SERVICE_NAME = "tandem.v1.Prefixes"
CALLERS = {SERVICE_NAME: frozenset({Role.PREFILL})}
"""Roles of those who may pull prefixes."""
_MAX_HASHES = 1 << 16
"""Limits one call; what is behind them is computed."""
_MAX_CHAINS = 64
_HASH_BYTES = 32
"""A chain's hashes have these alone: with more, one would name a block of another group."""

OfferContext: TypeAlias = "grpc.aio.ServicerContext[Any, prefixes_pb2.OfferReply]"


class OfferingCalls(Protocol):
    """The part of `PrefixCalls` that is needed here."""

    async def offer(self, chains: HashChains) -> PrefixOffered: ...


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
        chains = {chain.block_size: list(chain.hashes) for chain in request.chains}
        if not _are_bounded(chains):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "too many hashes, or some that are none"
            )
        peer = self._engine.ready.peer
        assert peer is not None, "a node that serves prefixes exchanges KV"
        try:
            peer.layout.check_compatible(peer_from_proto(request.asker).layout)
            _check_sizes(peer.layout, chains)
            offered = await self._engine.prefixes.offer(chains)
        except HandshakeMismatch as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except (EngineCallTimeout, EngineDeadError) as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return prefixes_pb2.OfferReply(
            holder=peer_to_proto(peer.group(offered.group)),
            transfer_id=offered.transfer_id,
            num_tokens=offered.num_tokens,
        )


def chains_to_proto(chains: HashChains) -> list[prefixes_pb2.HashChain]:
    """Returns the hashes of as many tokens as one call may name."""
    num_hashes = sum(map(len, chains.values()))
    most = max((size * len(hashes) for size, hashes in chains.items()), default=0)
    stop = most if num_hashes <= _MAX_HASHES else most * _MAX_HASHES // num_hashes
    return [
        prefixes_pb2.HashChain(block_size=size, hashes=hashes[: stop // size])
        for size, hashes in chains.items()
    ]


def _are_bounded(chains: HashChains) -> bool:
    are_hashes = all(len(name) == _HASH_BYTES for names in chains.values() for name in names)
    return (
        are_hashes and sum(map(len, chains.values())) <= _MAX_HASHES and len(chains) <= _MAX_CHAINS
    )


def _check_sizes(ours: KVLayout, chains: HashChains) -> None:
    """Checks that a prompt is named as our blocks are. Raises `HandshakeMismatch` for a peer with
    blocks of other sizes."""
    sizes = chain_sizes(ours.groups)
    if any(size not in chains for size in sizes):
        raise HandshakeMismatch("block_size", sizes, tuple(chains))
