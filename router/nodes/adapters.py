"""Loads and unloads adapters on all nodes of a model, for operators.

    load      prefill nodes ──▶ decode nodes ──▶ clients find the name
    unload    decode nodes ──▶ prefill nodes

So whoever answers by an adapter can have its prompts computed. Where a node cannot load one, those
that have loaded it unload it again: it is on all nodes, or on none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from edge.http.errors import BadRequest, NotFound
from edge.security.config import PlaintextRefused, Role
from edge.security.credentials import Credentials
from router.errors import NodesRefused, NoNodeAvailable
from router.nodes.address import NodeRole
from router.nodes.node import Node
from router.nodes.registry import NodeRegistry
from tandem_pb.node_pb2 import LoadAdapterRequest, UnloadAdapterRequest
from tandem_pb.node_pb2_grpc import NodeStatusStub

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 120.0
_UNLOAD_TIMEOUT_S = 600.0
"""Requests of the adapter end first."""
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
LOADED, UNLOADED, UNKNOWN = "loaded", "unloaded", "not there"
_ORDER = (NodeRole.PREFILL, NodeRole.DECODE)

Outcomes = dict[str, str]
"""Tell what became of a call on each node, by `role host:port`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAdapters:
    """Reaches the nodes of the registry."""

    registry: NodeRegistry
    credentials: Credentials

    async def load(
        self, name: str, path: str, *, in_place: bool = False, model: str = ""
    ) -> Outcomes:
        """Loads an adapter of `model`, which may be left out where there is one.

        Raises:
            NodesRefused: A node could not; no node that could keeps it.
            BadRequest: Several models are served, and none is named.
            NoNodeAvailable: No decode node is known.
        """
        request = LoadAdapterRequest(name=name, path=path, in_place=in_place)
        outcomes: Outcomes = {}
        loaded: list[Node] = []
        for nodes in self._tiers(model):
            found = await self._ask_all(nodes, request)
            outcomes |= _by_name(nodes, found)
            loaded += [n for n, said in zip(nodes, found, strict=True) if said == LOADED]
            if any(said != LOADED for said in found):
                await self._ask_all(loaded[::-1], UnloadAdapterRequest(name=name))
                raise NodesRefused(_refusal(name, outcomes))
        return outcomes

    async def unload(self, name: str, *, model: str = "") -> Outcomes:
        """Unloads an adapter; returns when its last request has ended.

        Raises:
            NotFound: No node has it.
            NodesRefused: A node could not.
        """
        outcomes: Outcomes = {}
        for nodes in reversed(self._tiers(model)):
            found = await self._ask_all(nodes, UnloadAdapterRequest(name=name))
            outcomes |= _by_name(nodes, found)
        if all(said == UNKNOWN for said in outcomes.values()):
            raise NotFound(
                f"no node has an adapter {name!r}", param="lora_name", code="model_not_found"
            )
        if any(said not in (UNLOADED, UNKNOWN) for said in outcomes.values()):
            raise NodesRefused(_refusal(name, outcomes))
        return outcomes

    def _tiers(self, model: str) -> list[list[Node]]:
        """Returns the nodes of the model, prefill nodes first."""
        decodes = [node for node in self.registry.nodes(NodeRole.DECODE) if node.report]
        models = sorted({node.model for node in decodes})
        if not model and len(models) > 1:
            raise BadRequest(
                f"Name the adapter's model in base_model_name: several are served, {models}",
                param="base_model_name",
            )
        own = [n for n in decodes if not model or (n.report and model in n.report.model_names)]
        if not own:
            raise NoNodeAvailable("No decode node of this model is known to the router now.")
        weights = {node.fingerprint for node in own}
        prefills = self.registry.nodes(NodeRole.PREFILL)
        return [[node for node in prefills if node.fingerprint in weights], own]

    async def _ask_all(
        self, nodes: Sequence[Node], request: LoadAdapterRequest | UnloadAdapterRequest
    ) -> list[str]:
        return list(await asyncio.gather(*(self._ask(node, request) for node in nodes)))

    async def _ask(self, node: Node, request: LoadAdapterRequest | UnloadAdapterRequest) -> str:
        target, role = node.address.status_target, Role(node.address.role)
        try:
            await self.credentials.meet(target)
            async with self.credentials.channel(target, role, _OPTIONS) as channel:
                stub = NodeStatusStub(channel)  # type: ignore[no-untyped-call]
                metadata = self.credentials.metadata()
                if isinstance(request, LoadAdapterRequest):
                    await stub.LoadAdapter(request, timeout=_LOAD_TIMEOUT_S, metadata=metadata)
                    return LOADED
                await stub.UnloadAdapter(request, timeout=_UNLOAD_TIMEOUT_S, metadata=metadata)
                return UNLOADED
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return UNKNOWN
            logger.warning("%s: %s for an adapter", node.address, error.code().name)
            return f"failed: {error.details() or error.code().name}"
        except PlaintextRefused as error:
            return f"failed: {error}"


def _by_name(nodes: Sequence[Node], found: Sequence[str]) -> Outcomes:
    names = (f"{node.address.role} {node.address}" for node in nodes)
    return dict(zip(names, found, strict=True))


def _refusal(name: str, outcomes: Outcomes) -> str:
    failed = [f"{node}: {said}" for node, said in outcomes.items() if said.startswith("failed")]
    return f"adapter {name!r} is not on all nodes: {'; '.join(failed)}"
