"""Loads and unloads adapters on all nodes of a model, for operators.

    load      prefill nodes ──▶ decode nodes ──▶ clients find the name
    unload    decode nodes ──▶ prefill nodes

So a decode node that answers by an adapter can have its prompts computed. Where a node cannot load
one, all go back to what the name stood for: it is on all nodes, or on none. Nodes that are away
follow when they come back (`router.nodes.adapters.adapter_sync`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from edge.adapter_call import AdapterCall
from edge.http.errors import BadRequest, NotFound
from edge.printable import listed
from router.errors import NodesAway, NodesRefused, NoNodeAvailable
from router.nodes.adapter_set import AdapterId
from router.nodes.adapters.adapter_asker import (
    LOADED,
    OUTDATED,
    UNKNOWN,
    UNLOADED,
    AdapterAsker,
    NodeAnswer,
    failure,
)
from router.nodes.address import NodeRole
from router.nodes.node import Node, NodeState
from router.nodes.registry import NodeRegistry
from tandem_pb.node_pb2 import LoadAdapterRequest, UnloadAdapterRequest

_POLL_S, _MOST_POLLS = 0.02, 150
_AWAY = (NodeState.JOINING, NodeState.ELSEWHERE, NodeState.DOWN)

Outcomes = dict[str, str]
"""Tell what became of a call on each node, by `role host:port`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAdapters:
    """Reaches the nodes of the registry.

    Attributes:
        changing: Names that a call is about now, each with its model.
    """

    registry: NodeRegistry
    asker: AdapterAsker
    changing: set[tuple[str, str]] = field(default_factory=set)

    async def load(
        self, name: str, path: str, *, in_place: bool = False, model: str = ""
    ) -> Outcomes:
        """Loads an adapter of `model`, which may be left out where there is one.

        Raises:
            NodesRefused: A node could not; all nodes have what they had.
            NodesAway: The same, because it did not answer.
            BadRequest: Several models are served, and none is named; or the name is taken.
            NoNodeAvailable: No decode node is known.
        """
        tiers = self._tiers(model)
        model = tiers[-1][0].model
        before = self._known(model, tiers, name)
        if before.digest and not in_place:
            raise BadRequest(
                f"the name {name!r} is taken already: unload it, or use load_inplace",
                param="lora_name",
            )
        version = self.registry.adapters.next_version(model, name)
        request = LoadAdapterRequest(
            name=name, path=path, in_place=in_place, version=version, model=model
        )
        outcomes: Outcomes = {}
        with self._change(model, name):
            for nodes in tiers:
                found = await self._ask_all(nodes, request)
                request.digest = request.digest or next((one.digest for one in found), "")
                found = [_checked(one, request.digest) for one in found]
                outcomes |= _by_name(nodes, found)
                if any(one.said != LOADED for one in found):
                    await self._take_back(tiers, before, version + 1)
                    raise _error(
                        found, f"adapter {name!r} is not on all nodes: {_faults(outcomes)}"
                    )
            call = AdapterCall(name, request.digest, path, version)
            self.registry.learn_calls(model, call)
            await self._until_sent(tiers, call)
        return outcomes

    async def _until_sent(self, tiers: Sequence[Sequence[Node]], call: AdapterCall) -> None:
        """Waits for the reports that name the adapter, so that the next request finds it. Not for
        long: a node may have gone since, and requests wait as well."""
        wanted = AdapterId(call.name, call.digest)
        for _ in range(_MOST_POLLS):
            if all(wanted in node.adapters for nodes in tiers for node in nodes):
                return
            await asyncio.sleep(_POLL_S)

    async def unload(self, name: str, *, model: str = "") -> Outcomes:
        """Unloads an adapter; returns when its last request has ended.

        Raises:
            NotFound: No node has it.
            NodesRefused: A node could not.
            NodesAway: It did not answer.
        """
        tiers = self._tiers(model)
        model = tiers[-1][0].model
        version = self.registry.adapters.next_version(model, name)
        request = UnloadAdapterRequest(name=name, version=version, model=model)
        outcomes: Outcomes = {}
        answers: list[NodeAnswer] = []
        with self._change(model, name):
            self.registry.learn_calls(model, AdapterCall(name, "", "", version))
            for nodes in reversed(tiers):
                answers += (found := await self._ask_all(nodes, request))
                outcomes |= _by_name(nodes, found)
        if all(said == UNKNOWN for said in outcomes.values()):
            raise NotFound(
                f"no node has an adapter {name!r}", param="lora_name", code="model_not_found"
            )
        if any(said not in (UNLOADED, UNKNOWN) for said in outcomes.values()):
            raise _error(
                answers,
                f"adapter {name!r} is not unloaded everywhere: {_faults(outcomes)}; those nodes "
                "are asked again",
            )
        return outcomes

    def _tiers(self, model: str) -> list[list[Node]]:
        """Returns the nodes of the model that are not away, prefill nodes first. There is a decode
        node."""
        decodes = [n for n in self.registry.nodes(NodeRole.DECODE) if not self._is_away(n)]
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
        return [[n for n in prefills if n.fingerprint in weights and not self._is_away(n)], own]

    def _is_away(self, node: Node) -> bool:
        return self.registry.state(node) in _AWAY

    def _known(self, model: str, tiers: Sequence[Sequence[Node]], name: str) -> AdapterCall:
        """Returns what a name stands for: by the newest call, or else by nodes' settings."""
        known = self.registry.adapters.calls(model).get(name)
        if known is not None:
            return known
        sets = {node.adapters for nodes in tiers for node in nodes}
        of_settings = {one.digest for adapters in sets for one in adapters if one.name == name}
        return AdapterCall(name, min(of_settings, default=""), "", 0)

    async def _take_back(
        self, tiers: Sequence[Sequence[Node]], before: AdapterCall, version: int
    ) -> None:
        """Makes all nodes go back to what a name stood for. Those that cannot now are asked again
        later."""
        request: LoadAdapterRequest | UnloadAdapterRequest
        model = tiers[-1][0].model
        if before.digest:
            request = LoadAdapterRequest(
                name=before.name,
                path=before.path,
                in_place=True,
                version=version,
                digest=before.digest,
                model=model,
            )
        else:
            request = UnloadAdapterRequest(name=before.name, version=version, model=model)
        for nodes in reversed(tiers):
            await self._ask_all(nodes, request)
        call = AdapterCall(before.name, before.digest, before.path, version)
        self.registry.learn_calls(model, call)

    @contextmanager
    def _change(self, model: str, name: str) -> Iterator[None]:
        """Keeps a name to one call at a time. Raises `BadRequest`."""
        if (model, name) in self.changing:
            raise BadRequest(
                f"another call about {name!r} has not ended: try again shortly", param="lora_name"
            )
        self.changing.add((model, name))
        try:
            yield
        finally:
            self.changing.discard((model, name))

    async def _ask_all(
        self, nodes: Sequence[Node], request: LoadAdapterRequest | UnloadAdapterRequest
    ) -> list[NodeAnswer]:
        return list(await asyncio.gather(*(self.asker.ask(node, request) for node in nodes)))


def _checked(answer: NodeAnswer, digest: str) -> NodeAnswer:
    """Refuses what is another adapter than the first node's."""
    if answer.said == LOADED and answer.digest != digest:
        return failure("other files lie there than on other nodes: give all nodes the same")
    return answer


def _error(answers: Sequence[NodeAnswer], message: str) -> NodesAway | NodesRefused:
    """Returns whose fault it is that a call was not followed everywhere."""
    faults = [one for one in answers if one.failed or one.said == OUTDATED]
    return NodesAway(message) if all(one.is_away for one in faults) else NodesRefused(message)


def _by_name(nodes: Sequence[Node], found: Sequence[NodeAnswer]) -> Outcomes:
    names = (f"{node.address.role} {node.address}" for node in nodes)
    return dict(zip(names, (one.said for one in found), strict=True))


def _faults(outcomes: Outcomes) -> str:
    faults = {node: said for node, said in outcomes.items() if said.startswith("failed")}
    faults |= {node: "a newer call came" for node, said in outcomes.items() if said == OUTDATED}
    return listed([f"{node}: {said}" for node, said in faults.items()], between="; ")
