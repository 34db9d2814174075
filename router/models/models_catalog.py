"""Lists the models that the cluster serves, as its decode nodes describe them."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from edge.http.errors import BadRequest, NotFound
from router.errors import NodeLost, NodeUnreachable, NoNodeAvailable, PathUnknown
from router.models.known_models import KnownModels
from router.nodes.adapter_set import AdapterId, AdapterSet
from router.nodes.address import NodeRole
from router.nodes.http.node_get import NodeGet
from router.nodes.node import Node
from router.nodes.registry import NodeRegistry

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0

ModelCard = dict[str, object]


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


@dataclass(slots=True, kw_only=True)
class ModelCatalog:
    """Asks nodes what they serve, and how."""

    registry: NodeRegistry
    models: KnownModels
    get: NodeGet

    async def list_models(self) -> list[ModelCard]:
        """Returns all models, each asked of one node that serves it, with their aliases and splits.
        One whose nodes are all away is missing."""
        groups = with_all_adapters(self.registry.usable(NodeRole.DECODE))
        lists = await asyncio.gather(*map(self._ask_any, groups))
        cards = {str(card.get("id")): card for cards in lists for card in cards}
        cards |= self._ruled(cards)
        return [cards[model_id] for model_id in sorted(cards)]

    def _ruled(self, cards: Mapping[str, ModelCard]) -> dict[str, ModelCard]:
        """Returns cards of the names that only the rules know: like that of the first version that
        has one, with `root` naming what stands behind an alias, and `versions` the shares of a
        split."""
        table = self.models.table
        ruled: dict[str, ModelCard] = {}
        for name in (*table.rules.aliases, *table.rules.splits):
            route = table.route(name)
            known = [cards[version] for version, _ in route.versions if version in cards]
            if not known:
                continue
            total = sum(weight for _, weight in route.versions)
            shares = {version: weight / total for version, weight in route.versions}
            card = known[0] | {"id": name, "display_name": name, "root": route.name}
            ruled[name] = card | ({"versions": shares} if len(shares) > 1 else {})
        return ruled

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
        return await self._ask_first("/openapi.json")

    async def tokenizer(self) -> dict[str, Any]:
        """Returns a decode node's description of the tokenizer.

        Raises:
            BadRequest: several models are served, and the question names none.
            NotFound: nodes may not tell.
            NoNodeAvailable: none can be asked now.
        """
        nodes = self.registry.usable(NodeRole.DECODE)
        names = sorted({node.model for node in nodes if node.report})
        if len(names) > 1:
            raise BadRequest(f"/tokenizer_info is for clusters of one model; here are {names}")
        try:
            return await self._ask_first("/tokenizer_info")
        except PathUnknown:
            raise NotFound(
                "no decode node tells it: start them with --enable-tokenizer-info-endpoint"
            ) from None

    async def _ask_first(self, path: str) -> dict[str, Any]:
        """Returns the answer of the first decode node that has one. Raises `NoNodeAvailable`, or
        `PathUnknown` when those that answer know nothing of `path`."""
        unknown: PathUnknown | None = None
        for node in self.registry.usable(NodeRole.DECODE):
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    return await self.get.json(node, path, dict[str, Any])
            except PathUnknown as error:
                unknown = error
            except (NodeUnreachable, NodeLost, TimeoutError, msgspec.MsgspecError) as error:
                logger.warning("no %s from %s: %s", path, node.address, error)
        if unknown:
            raise unknown
        raise NoNodeAvailable("No decode node can describe its API now. Try again shortly.")


def with_all_adapters(decodes: Iterable[Node]) -> list[list[Node]]:
    """Returns groups of nodes, of which one each knows all models and adapters. While a tier loads
    adapters, nearly every node has others, of which most have more: those stand in for it."""
    alike: defaultdict[tuple[str, AdapterSet], list[Node]] = defaultdict(list)
    for node in decodes:
        alike[node.model, node.adapters].append(node)
    groups: defaultdict[str, list[list[Node]]] = defaultdict(list)
    known: defaultdict[str, set[AdapterId]] = defaultdict(set)
    for (model, adapters), nodes in sorted(alike.items(), key=lambda one: -len(one[0][1])):
        if not groups[model] or not adapters <= known[model]:
            groups[model].append(nodes)
            known[model] |= adapters
        else:
            groups[model][0] += nodes
    return [group for of_model in groups.values() for group in of_model]
