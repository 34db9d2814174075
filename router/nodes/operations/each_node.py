"""Asks several nodes the same, for operators, and says of each what became of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import grpc

from edge.grpc_answers import GarbledAnswer
from edge.security.config import PlaintextRefused
from edge.security.credentials import Credentials
from router.nodes.node import Node
from router.nodes.operations.named_node import node_stub
from tandem_pb.node_pb2_grpc import NodeStatusStub

logger = logging.getLogger(__name__)

Ask = Callable[[NodeStatusStub], Awaitable[str]]
"""Makes the call, and says what the node answers. May raise `GarbledAnswer`."""
FAILED = "failed: "


async def ask_each(credentials: Credentials, nodes: Sequence[Node], ask: Ask) -> dict[str, str]:
    """Returns what became of each call, by `role host:port`; failures begin with `FAILED`."""
    outcomes = await asyncio.gather(*map(partial(_ask_one, credentials, ask), nodes))
    names = [f"{node.address.role} {node.address}" for node in nodes]
    return dict(zip(names, outcomes, strict=True))


async def _ask_one(credentials: Credentials, ask: Ask, node: Node) -> str:
    try:
        async with node_stub(credentials, node) as stub:
            return await ask(stub)
    except grpc.aio.AioRpcError as error:
        logger.warning("%s does not do what an operator asks: %s", node.address, error.code().name)
        return f"{FAILED}{error.code().name}"
    except (GarbledAnswer, PlaintextRefused) as error:
        return f"{FAILED}{error}"
