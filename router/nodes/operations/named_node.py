"""Finds the node that an operator names, and reaches it for one call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from edge.grpc_answers import SHORT_CALL_S, QuietChannel, asked_twice
from edge.http.errors import NotFound
from edge.printable import listed
from edge.security.config import Role
from edge.security.credentials import Credentials
from router.errors import NodesAway
from router.nodes.node import Node
from router.nodes.registry import NodeRegistry
from tandem_pb.node_pb2_grpc import NodeStatusStub

TIMEOUT_S = SHORT_CALL_S
_TWICE = ("AbortAnswers", "ResetPrefixCache", "SetDrained")
"""Names no change of role: a node that has begun one refuses the same again."""
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    *asked_twice("tandem.v1.NodeStatus", _TWICE),
)


def named_node(registry: NodeRegistry, name: str) -> Node:
    """Returns a node that has reported. `name`: where it serves, or its load reports, by any entry
    of the node list that it is, or its id.

    Raises:
        NotFound: There is no such node.
        NodesAway: It has not reported yet.
    """
    nodes = registry.all_nodes()
    entries = {node.listed: node for node in nodes}
    for node in nodes:
        places = (node.address.target, node.address.status_target)
        if node.report is not None and name in (*places, node.report.node_id):
            return node
        if node.report is None and name in places:
            one = entries.get(node.counts_at) if node.counts_at is not None else None
            if one is not None and one.report is not None:
                return one
            raise NodesAway(f"{node.address} has not reported yet; try again")
    states = {node: "" if node.report else f" ({registry.state(node)})" for node in nodes}
    shown = listed(sorted(f"{node.address}{state}" for node, state in states.items())) or "none"
    raise NotFound(f"no node is known as {name!r}; there are {shown}", param="node")


@asynccontextmanager
async def node_stub(credentials: Credentials, node: Node) -> AsyncIterator[NodeStatusStub]:
    """Yields what calls `node`; each answer has to be `readable`. Raises `PlaintextRefused`."""
    target = node.address.status_target
    await credentials.meet(target)
    async with credentials.channel(target, Role(node.address.role), _OPTIONS) as channel:
        yield NodeStatusStub(QuietChannel(channel))  # type: ignore[no-untyped-call]
