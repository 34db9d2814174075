"""Makes a node change its role, for operators: from prefill to decode, or back.

The node drains and comes back as a new node of the other tier, where its reports lead the registry.
The last decode node of a model is not taken away: nothing could answer then. Without prefill nodes
decode nodes compute prompts themselves.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import grpc

from edge.grpc_answers import GarbledAnswer, readable, words_of
from edge.security.config import PlaintextRefused
from edge.security.credentials import Credentials
from router.errors import NodesRefused
from router.nodes.address import NodeRole
from router.nodes.node import Node
from router.nodes.operations.named_node import TIMEOUT_S, named_node, node_stub
from router.nodes.registry import NodeRegistry
from tandem_pb.node_pb2 import NODE_ROLE_DECODE, NODE_ROLE_PREFILL, SwitchRoleRequest

logger = logging.getLogger(__name__)

_ROLES = {NodeRole.PREFILL: NODE_ROLE_PREFILL, NodeRole.DECODE: NODE_ROLE_DECODE}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChanges:
    """Reaches the nodes of the registry, one call at a time."""

    registry: NodeRegistry
    credentials: Credentials
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def change(self, name: str, role: NodeRole, drain_timeout_s: float) -> Node:
        """Returns the node as it was, once it has begun to drain. `name`: where it serves, or its
        load reports, or its id.

        Raises:
            NotFound: There is no such node.
            NodesAway: It has not reported yet.
            NodesRefused: It cannot change, cannot be reached, or is needed.
        """
        async with self.lock:
            node = named_node(self.registry, name)
            if role is NodeRole.PREFILL and node.address.role is NodeRole.DECODE:
                self._check_not_last(node)
            await self._ask(node, role, drain_timeout_s)
            self.registry.mark_draining(node)
            return node

    def _check_not_last(self, node: Node) -> None:
        usable = self.registry.usable(NodeRole.DECODE)
        if not any(other is not node and other.model == node.model for other in usable):
            raise NodesRefused(
                f"{node.address} is the last decode node of {node.model!r}: no node could answer "
                "then. Let another node change to decode first"
            )

    async def _ask(self, node: Node, role: NodeRole, drain_timeout_s: float) -> None:
        request = SwitchRoleRequest(role=_ROLES[role], drain_timeout_s=drain_timeout_s)
        try:
            async with node_stub(self.credentials, node) as stub:
                metadata = self.credentials.metadata()
                readable(await stub.SwitchRole(request, timeout=TIMEOUT_S, metadata=metadata))
        except grpc.aio.AioRpcError as error:
            logger.warning("%s does not change its role: %s", node.address, error.code().name)
            raise NodesRefused(
                f"{node.address} does not change its role: {words_of(error)}"
            ) from None
        except GarbledAnswer as error:
            raise NodesRefused(f"{node.address} does not change its role: {error}") from None
        except PlaintextRefused as error:
            raise NodesRefused(f"{node.address} is not asked: {error}") from None
