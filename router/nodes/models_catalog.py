"""Lists the models that the cluster serves, as its decode nodes describe them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from router.errors import NodeLost, NodeUnreachable
from router.nodes.address import NodeRole
from router.nodes.node import Node
from router.nodes.registry import NodeRegistry
from router.nodes.transport import Transport, UpstreamResponse

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_MAX_BYTES = 1 << 20

ModelCard = dict[str, object]


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


@dataclass(slots=True, kw_only=True)
class ModelCatalog:
    registry: NodeRegistry
    transport: Transport
    node_api_key: str = ""

    async def list_models(self) -> list[ModelCard]:
        """Returns all models, each asked of one node that serves it."""
        by_model: dict[str, list[Node]] = {}
        for node in self.registry.usable(NodeRole.DECODE):
            name = node.report.model_name if node.report else ""
            by_model.setdefault(name, []).append(node)
        lists = await asyncio.gather(*map(self._ask_any, by_model.values()))
        cards = {str(card.get("id")): card for cards in lists for card in cards}
        return [cards[model_id] for model_id in sorted(cards)]

    async def _ask_any(self, nodes: Sequence[Node]) -> list[ModelCard]:
        for node in nodes:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    return await self._ask(node)
            except (NodeUnreachable, NodeLost, TimeoutError, msgspec.MsgspecError) as error:
                logger.warning("no model list from %s: %s", node.address, type(error).__name__)
        return []

    async def _ask(self, node: Node) -> list[ModelCard]:
        headers = {"accept": "application/json"}
        if self.node_api_key:
            headers["authorization"] = f"Bearer {self.node_api_key}"
        url = f"http://{node.address.target}/v1/models"
        response = await self.transport.request("GET", url, headers)
        try:
            return msgspec.json.decode(await _read_all(response), type=_ModelList).data
        finally:
            response.close()


async def _read_all(response: UpstreamResponse) -> bytes:
    body = b""
    while chunk := await response.read_chunk():
        body += chunk
        if len(body) > _MAX_BYTES:
            raise NodeLost("the model list is too long")
    return body
