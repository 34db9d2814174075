"""Asks one node to load or unload an adapter, over a connection of its own.

A node reads one adapter at a time. Loads wait for their turn here, so that the time of each begins
when the node begins, however long the others take.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import grpc

from edge.adapter_call import LOAD_LIMIT_S, UNLOAD_LIMIT_S
from edge.grpc_answers import (
    GarbledAnswer,
    QuietChannel,
    asked_twice,
    readable,
    words_of,
)
from edge.security.config import PlaintextRefused, Role
from edge.security.credentials import Credentials
from router.nodes.address import NodeAddress
from router.nodes.node import Node
from tandem_pb.node_pb2 import Adapter, LoadAdapterRequest, UnloadAdapterRequest
from tandem_pb.node_pb2_grpc import NodeStatusStub

logger = logging.getLogger(__name__)

_MORE_S = 20.0
"""A node has this much longer than its own limits, so that its answer says why."""
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    *asked_twice("tandem.v1.NodeStatus", ["LoadAdapter"]),
)
"""One that is unloaded again is not there: the answer would be another."""
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
LOADED, UNLOADED, UNKNOWN, OUTDATED = "loaded", "unloaded", "not there", "outdated"


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """Says what became of a call: one of the words above, or why it failed.

    Attributes:
        digest: What was loaded.
        is_away: Nothing is wrong with the call: the node did not answer, or cannot now.
    """

    said: str
    digest: str = ""
    is_away: bool = False

    @property
    def failed(self) -> bool:
        return self.said.startswith("failed")


def failure(fault: str, *, is_away: bool = False) -> NodeAnswer:
    """Returns what is said of a node that could not."""
    return NodeAnswer(f"failed: {fault}", is_away=is_away)


@dataclass(frozen=True, slots=True)
class AdapterAsker:
    """Makes calls, with the router's credentials."""

    credentials: Credentials
    _loads: WeakValueDictionary[NodeAddress, asyncio.Lock] = field(
        default_factory=WeakValueDictionary
    )

    async def ask(
        self, node: Node, request: LoadAdapterRequest | UnloadAdapterRequest
    ) -> NodeAnswer:
        """Returns what the node answers. Raises nothing that a node may cause."""
        if isinstance(request, UnloadAdapterRequest):
            return await self._call(node, request)
        async with self._loads.setdefault(node.address, asyncio.Lock()):
            return await self._call(node, request)

    async def _call(
        self, node: Node, request: LoadAdapterRequest | UnloadAdapterRequest
    ) -> NodeAnswer:
        target, role = node.address.status_target, Role(node.address.role)
        try:
            await self.credentials.meet(target)
            async with self.credentials.channel(target, role, _OPTIONS) as channel:
                stub = NodeStatusStub(QuietChannel(channel))  # type: ignore[no-untyped-call]
                metadata = self.credentials.metadata()
                is_load = isinstance(request, LoadAdapterRequest)
                method = stub.LoadAdapter if is_load else stub.UnloadAdapter
                # Before its time begins, what another router has the node load may take as long.
                timeout_s = (2 * LOAD_LIMIT_S if is_load else UNLOAD_LIMIT_S) + _MORE_S
                answer: Adapter | None = await method(request, timeout=timeout_s, metadata=metadata)
                digest = readable(answer).digest
                return NodeAnswer(LOADED, digest) if is_load else NodeAnswer(UNLOADED)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return NodeAnswer(UNKNOWN)
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                return NodeAnswer(OUTDATED)
            logger.warning("%s: %s for an adapter", node.address, error.code().name)
            return failure(words_of(error), is_away=error.code() in _AWAY)
        except (GarbledAnswer, PlaintextRefused) as error:
            return failure(str(error))
