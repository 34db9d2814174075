"""Resets the prefix caches of all nodes, for operators: after an attack on them, or to measure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from edge.grpc_answers import GarbledAnswer, QuietChannel, readable
from edge.security.config import PlaintextRefused, Role
from edge.security.credentials import Credentials
from router.nodes.address import NodeAddress
from router.nodes.registry import NodeRegistry
from tandem_pb.node_pb2 import ResetPrefixCacheAnswer, ResetPrefixCacheRequest
from tandem_pb.node_pb2_grpc import NodeStatusStub

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
RESET = "reset"
IN_USE = "in use: requests are running; try again when they have ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCaches:
    """Reaches the caches of the registry's nodes. `forget` makes the router forget what it has
    learnt of them."""

    registry: NodeRegistry
    credentials: Credentials
    forget: Callable[[], None]

    async def reset(self) -> dict[str, str]:
        """Returns what became of each node's cache, by `role host:port`; `RESET` is success."""
        addresses = [node.address for node in self.registry.all_nodes()]
        outcomes = await asyncio.gather(*map(self._reset_one, addresses))
        self.forget()
        names = [f"{address.role} {address}" for address in addresses]
        return dict(zip(names, outcomes, strict=True))

    async def _reset_one(self, address: NodeAddress) -> str:
        target, role = address.status_target, Role(address.role)
        try:
            await self.credentials.meet(target)
            async with self.credentials.channel(target, role, _OPTIONS) as channel:
                stub = NodeStatusStub(QuietChannel(channel))  # type: ignore[no-untyped-call]
                answer: ResetPrefixCacheAnswer | None = await stub.ResetPrefixCache(
                    ResetPrefixCacheRequest(),
                    timeout=_TIMEOUT_S,
                    metadata=self.credentials.metadata(),
                )
            is_reset = readable(answer).is_reset
        except grpc.aio.AioRpcError as error:
            logger.warning("%s: its cache cannot be reset: %s", address, error.code().name)
            return f"failed: {error.code().name}"
        except (GarbledAnswer, PlaintextRefused) as error:
            return f"failed: {error}"
        return RESET if is_reset else IN_USE
