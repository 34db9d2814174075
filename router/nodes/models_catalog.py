"""Lists the models that the cluster serves, as its decode nodes describe them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.errors import NodeLost, NodeUnreachable, NoNodeAvailable
from router.nodes.address import NodeRole
from router.nodes.node import Node
from router.nodes.node_get import NodeGet
from router.nodes.registry import NodeRegistry

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0

ModelCard = dict[str, object]


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


@dataclass(slots=True, kw_only=True)
class ModelCatalog:
    """Asks nodes what they serve, and how."""

    registry: NodeRegistry
    get: NodeGet

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
                    return (await self.get.json(node, "/v1/models", _ModelList)).data
            except (NodeUnreachable, NodeLost, TimeoutError, msgspec.MsgspecError) as error:
                logger.warning("no model list from %s: %s", node.address, type(error).__name__)
        return []

    async def document(self) -> dict[str, Any]:
        """Returns the OpenAPI document of a decode node. Raises `NoNodeAvailable`."""
        for node in self.registry.usable(NodeRole.DECODE):
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    return await self.get.json(node, "/openapi.json", dict[str, Any])
            except (NodeUnreachable, NodeLost, TimeoutError, msgspec.MsgspecError) as error:
                logger.warning("no OpenAPI document from %s: %s", node.address, error)
        raise NoNodeAvailable("No decode node can describe its API now. Try again shortly.")
