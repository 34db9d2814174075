"""Resets the prefix caches of all nodes, for operators: after an attack on them, or to measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from edge.grpc_answers import readable
from edge.security.credentials import Credentials
from router.nodes.operations.each_node import ask_each
from router.nodes.operations.named_node import TIMEOUT_S
from router.nodes.registry import NodeRegistry
from tandem_pb.node_pb2 import ResetPrefixCacheAnswer, ResetPrefixCacheRequest
from tandem_pb.node_pb2_grpc import NodeStatusStub

RESET = "reset"
IN_USE = "in use: requests are running; try again when they have ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCaches:
    """Reaches the caches of the registry's nodes. `forget` makes the router forget what it has
    learnt of them."""

    registry: NodeRegistry
    credentials: Credentials
    forget: Callable[[], None]

    async def reset(self, within_s: float = 0.0) -> dict[str, str]:
        """Returns what became of each node's cache, by `role host:port`; `RESET` is success. Nodes
        wait up to `within_s` for requests to end."""
        ask = partial(self._reset, within_s)
        outcomes = await ask_each(self.credentials, self.registry.all_nodes(), ask)
        self.forget()
        return outcomes

    async def _reset(self, within_s: float, stub: NodeStatusStub) -> str:
        answer: ResetPrefixCacheAnswer | None = await stub.ResetPrefixCache(
            ResetPrefixCacheRequest(within_s=within_s),
            timeout=TIMEOUT_S + within_s,
            metadata=self.credentials.metadata(),
        )
        return RESET if readable(answer).is_reset else IN_USE
