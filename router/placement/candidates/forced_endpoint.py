"""Sends a request to the one node that an operator named for it, for tests of that node.

What a test is for may be a node that no other request gets: one that was drained by call, or that
was ejected. So its state counts only where it cannot answer. No other node takes its place: the
request fails where it fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from router.errors import NoNodeAvailable
from router.nodes.address import NodeRole
from router.nodes.node import Node, NodeState
from router.nodes.operations.named_node import named_node
from router.nodes.registry import NodeRegistry
from router.request.info import RequestInfo

_CANNOT_ANSWER = (NodeState.JOINING, NodeState.LEAVING, NodeState.DRAINING, NodeState.DOWN)


def forced_node(
    registry: NodeRegistry, request: RequestInfo, tried: Collection[Node]
) -> Node | None:
    """Returns the node that the request must go to; None: any may have it.

    Raises:
        NotFound: There is no such node.
        NoNodeAvailable: It cannot have this request, or has failed it.
    """
    if not request.endpoint:
        return None
    node = named_node(registry, request.endpoint)
    state = registry.state(node)
    if node in tried or state in _CANNOT_ANSWER:
        why = "has failed the request" if node in tried else f"is {state}"
        raise NoNodeAvailable(f"{node.address}, which the request must go to, {why}.")
    is_decode = node.address.role is NodeRole.DECODE
    names = node.report.model_names if node.report else ()
    if is_decode and request.model and request.model not in names:
        raise NoNodeAvailable(f"{node.address} does not serve {request.model!r}.")
    if request.adapter_digest and not node.has_weights(request.adapter_digest):
        raise NoNodeAvailable(f"{node.address} does not have {request.adapter!r}.")
    return node


def forced_partners(nodes: Iterable[Node], prefill: Node) -> list[Node]:
    """Returns those decode nodes that can use KV of the prefill node which is forced. Raises
    `NoNodeAvailable`."""
    found = [node for node in nodes if node.fingerprint == prefill.fingerprint]
    if not found:
        raise NoNodeAvailable(f"No decode node can use KV of {prefill.address}.")
    return found
