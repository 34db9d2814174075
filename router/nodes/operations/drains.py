"""Takes nodes out of use and back, for operators.

The node itself is asked, and its answer is a report that is newer than those on their way. Its
reports say what it is, so every router knows, also one that starts later; a node that starts again,
or changes its role, is in use.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from edge.grpc_answers import GarbledAnswer, readable, words_of
from edge.security.config import PlaintextRefused
from edge.security.credentials import Credentials
from router.errors import NodesAway, NodesRefused
from router.nodes.node import Node
from router.nodes.operations.named_node import TIMEOUT_S, named_node, node_stub
from router.nodes.registry import NodeRegistry
from router.nodes.report import NodeReport
from tandem_pb.node_pb2 import SetDrainedAnswer, SetDrainedRequest

_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDrains:
    """Reaches the nodes of the registry."""

    registry: NodeRegistry
    credentials: Credentials

    async def set(self, name: str, is_drained: bool) -> tuple[Node, bool]:
        """Returns the node, once it is so, and whether it was not before. `name`: as of
        `named_node`.

        Raises:
            NotFound: There is no such node.
            NodesAway: It does not answer, or has not reported yet.
            NodesRefused: It stops, changes its role, or does not know this call.
        """
        node = named_node(self.registry, name)
        answer = await self._ask(node, is_drained)
        self.registry.apply_report(node.listed, NodeReport.from_message(answer.load))
        return named_node(self.registry, node.address.target), answer.changed

    async def _ask(self, node: Node, is_drained: bool) -> SetDrainedAnswer:
        request = SetDrainedRequest(drained=is_drained)
        try:
            async with node_stub(self.credentials, node) as stub:
                metadata = self.credentials.metadata()
                answer = await stub.SetDrained(request, timeout=TIMEOUT_S, metadata=metadata)
                reply: SetDrainedAnswer = readable(answer)
                return reply
        except grpc.aio.AioRpcError as error:
            if error.code() in _AWAY:
                raise NodesAway(f"{node.address} does not answer: {words_of(error)}") from None
            raise NodesRefused(f"{node.address} refuses: {words_of(error)}") from None
        except GarbledAnswer as error:
            raise NodesRefused(f"{node.address} is not understood: {error}") from None
        except PlaintextRefused as error:
            raise NodesRefused(f"{node.address} is not asked: {error}") from None
