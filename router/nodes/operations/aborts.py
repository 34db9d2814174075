"""Ends answers early, for operators: trainers take what there is, and go on with new weights.

    at a node            the node ends them, whichever router has sent them
    waits in this router goes to a node when its turn comes, which answers without a token

What waits in another router, and what is on its way to a node in this moment, is not met.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from edge.grpc_answers import readable
from edge.security.credentials import Credentials
from router.nodes.address import NodeRole
from router.nodes.operations.each_node import ask_each
from router.nodes.operations.named_node import TIMEOUT_S
from router.nodes.registry import NodeRegistry
from router.request.request_history import RequestHistory
from tandem_pb.node_pb2 import AbortAnswersAnswer, AbortAnswersRequest
from tandem_pb.node_pb2_grpc import NodeStatusStub


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborts:
    """Reaches the decode nodes of the registry. `open_requests` are this router's."""

    registry: NodeRegistry
    credentials: Credentials
    open_requests: Callable[[], Iterable[RequestHistory]]

    async def abort(self, names: Collection[str] | None) -> dict[str, str]:
        """Ends the answers of these names, or all. Returns what each node says, by
        `role host:port`."""
        for record in self.open_requests():
            if names is None or not record.names.isdisjoint(names):
                record.is_aborted = True
        request = AbortAnswersRequest(names=names or (), all=names is None)

        async def ask(stub: NodeStatusStub) -> str:
            answer: AbortAnswersAnswer | None = await stub.AbortAnswers(
                request, timeout=TIMEOUT_S, metadata=self.credentials.metadata()
            )
            return f"aborted {readable(answer).num_aborted}"

        nodes = [n for n in self.registry.all_nodes() if n.address.role is NodeRole.DECODE]
        return await ask_each(self.credentials, nodes, ask)
