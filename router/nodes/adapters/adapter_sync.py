"""Brings nodes up to date that missed calls about adapters: they started, or came back, later.

A node is behind in a name if it has not followed the newest call that the registry's ledger knows.

    behind ──its turn──▶ asked ──▶ followed: it says so in its reports, or has said so in its answer
      ▲                    │
      └── pause of 1 .. 60 s ◀── it could not: its fault is logged

Turns follow the tiers: a decode node loads an adapter once a prefill node that works for it has it,
or if there is none at all; a prefill node unloads one when no decode node has it any more. Each
node loads one adapter at a time; to unload one takes as long as its requests, and holds up nothing.
Several routers may ask for the same: the version says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from edge.adapter_call import AdapterCall
from router.nodes.adapters.adapter_asker import OUTDATED, NodeAnswer, failure
from router.nodes.adapters.adapters import ClusterAdapters
from router.nodes.address import NodeRole
from router.nodes.node import Node, NodeState
from router.nodes.partners import Weights, by_weights, partners_of
from router.nodes.registry import NodeRegistry
from tandem_pb.node_pb2 import LoadAdapterRequest, UnloadAdapterRequest

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_IN_TOUCH = (NodeState.READY, NodeState.HALF_OPEN, NodeState.EJECTED, NodeState.DRAINED)


@dataclass(slots=True)
class _Tries:
    """Says when a node is asked again for one call."""

    retry_at: float
    pause_s: float = _FIRST_PAUSE_S


@dataclass(slots=True)
class _Missed:
    """Holds the calls that a node has not followed, of the first `num_known` of its model. Once it
    has, nothing is looked at until there are others."""

    num_known: int = 0
    calls: dict[str, AdapterCall] = field(default_factory=dict)


class _Tiers:
    """Says what there is on nodes that stand in for each other, as of one look."""

    def __init__(self, registry: NodeRegistry) -> None:
        self._registry = registry
        self._prefills = by_weights(registry.nodes(NodeRole.PREFILL))
        self._digests: dict[Weights, Collection[str] | None] = {}
        self._names: dict[str, Collection[str]] = {}

    def computed(self, decode: Node) -> Collection[str] | None:
        """Returns the digests of adapters of the prefill nodes that work for `decode`; None: there
        are no such nodes."""
        key = decode.fingerprint, decode.model
        if key not in self._digests:
            partners = partners_of(decode, self._prefills)
            usable = [node for node in partners if self._registry.usable_of([node])]
            sets = {node.adapters for node in usable}
            self._digests[key] = set[str]().union(*(s.digests for s in sets)) if usable else None
        return self._digests[key]

    def answered(self, prefill: Node) -> Collection[str]:
        """Returns the adapters' names that decode nodes in touch answer by, of those that `prefill`
        works for."""
        fingerprint = prefill.fingerprint
        if fingerprint not in self._names:
            sets = {
                node.adapters
                for node in self._registry.nodes(NodeRole.DECODE)
                if node.fingerprint == fingerprint and self._registry.state(node) in _IN_TOUCH
            }
            self._names[fingerprint] = set[str]().union(*(one.names for one in sets))
        return self._names[fingerprint]


@dataclass(slots=True, kw_only=True)
class AdapterSync:
    """Asks nodes, in tasks of its own. `step` starts what is due."""

    adapters: ClusterAdapters
    _busy: dict[tuple[Node, str], asyncio.Task[None]] = field(default_factory=dict)
    """Holds what is being asked: one load of a node, under "", and unloads by their names."""
    _answered: dict[Node, dict[str, AdapterCall]] = field(default_factory=dict)
    _tries: dict[tuple[Node, AdapterCall], _Tries] = field(default_factory=dict)
    _missed: dict[tuple[Node, str], _Missed] = field(default_factory=dict)
    """Keeps it by node and model: a prefill node may work for several."""

    async def run(self) -> None:
        """Goes on until it is cancelled, and so is what it has started."""
        try:
            while True:
                try:
                    self.step()
                except Exception:
                    logger.exception("nodes that miss adapters could not be looked for")
                await asyncio.sleep(_INTERVAL_S)
        finally:
            for task in self._busy.values():
                task.cancel()
            await asyncio.gather(*self._busy.values(), return_exceptions=True)

    def step(self) -> None:
        """Starts to ask every node that is behind, not busy, and whose turn it is."""
        self._forget()
        now = self._registry.clock()
        for node, call in self._turns():
            tries = self._tries.get((node, call))
            key = node, "" if call.digest else call.name
            if key not in self._busy and (tries is None or now >= tries.retry_at):
                self._busy[key] = asyncio.create_task(self._bring(key, call))

    def num_behind(self) -> dict[NodeRole, int]:
        """Returns how many calls the nodes of each tier have not followed yet."""
        behind = Counter(node.address.role for node, _ in self._behind())
        return {role: behind[role] for role in NodeRole}

    @property
    def _registry(self) -> NodeRegistry:
        return self.adapters.registry

    def _behind(self) -> Iterator[tuple[Node, AdapterCall]]:
        """Yields the calls that nodes in touch have not followed, by node."""
        ledger = self._registry.adapters
        decodes = [one for one in self._registry.nodes(NodeRole.DECODE) if ledger.calls(one.model)]
        groups = by_weights(self._registry.nodes(NodeRole.PREFILL)) if decodes else {}
        of_kinds = {(node.fingerprint, node.model): node for node in decodes}.values()
        models = {(node, node.model): None for node in decodes}
        models |= {(prefill, d.model): None for d in of_kinds for prefill in partners_of(d, groups)}
        for node, model in models:
            if node.report is None or self._registry.state(node) not in _IN_TOUCH:
                continue
            missed = self._missed.setdefault((node, model), _Missed())
            new, missed.num_known = ledger.since(model, missed.num_known)
            missed.calls.update((call.name, call) for call in new)
            for call in list(missed.calls.values()):
                if ledger.calls(model).get(call.name) is not call or self._follows(node, call):
                    del missed.calls[call.name]
                elif (model, call.name) not in self.adapters.changing:
                    yield node, call

    def _follows(self, node: Node, call: AdapterCall) -> bool:
        """Returns whether a node has followed a call or a newer one, as far as it has said."""
        name = call.name
        said = (node.followed.get(name), self._answered.get(node, {}).get(name))
        return any(one is not None and one.order >= call.order for one in said)

    def _turns(self) -> Iterator[tuple[Node, AdapterCall]]:
        """Yields what of it may be done now."""
        tiers = _Tiers(self._registry)
        for node, call in self._behind():
            is_prefill = node.address.role is NodeRole.PREFILL
            computed = None if is_prefill or not call.digest else tiers.computed(node)
            if computed is not None and call.digest not in computed:
                continue
            if not call.digest and is_prefill and call.name in tiers.answered(node):
                continue
            yield node, call

    async def _bring(self, key: tuple[Node, str], call: AdapterCall) -> None:
        """Asks a node to follow a call."""
        node = key[0]
        try:
            answer = await self.adapters.asker.ask(node, _request(call))
        except Exception as error:
            logger.exception("%s node %s could not be asked", node.address.role, node.address)
            answer = failure(type(error).__name__)
        finally:
            del self._busy[key]
        self._handle_answer(node, call, answer)

    def _handle_answer(self, node: Node, call: AdapterCall, answer: NodeAnswer) -> None:
        key = node, call
        if not answer.failed:
            self._tries.pop(key, None)
            self._answered.setdefault(node, {})[call.name] = call
            if answer.said != OUTDATED:
                where, name = f"{node.address.role} node {node.address}", call.name
                what = "loaded" if call.digest else "unloaded"
                logger.info("%s has %s adapter %r, which it had missed", where, what, name)
            return
        last = self._tries.get(key)
        pause_s = _FIRST_PAUSE_S if last is None else min(_LONGEST_PAUSE_S, 2 * last.pause_s)
        self._tries[key] = _Tries(self._registry.clock() + pause_s, pause_s)
        logger.warning(
            "%s node %s does not follow what was done to adapter %r; it is asked again in %.0f s: "
            "%s",
            node.address.role,
            node.address,
            call.name,
            pause_s,
            answer.said,
        )

    def _forget(self) -> None:
        """Forgets nodes that have gone, and calls that newer ones have replaced."""
        nodes = set(self._registry.all_nodes())
        self._missed = {key: missed for key, missed in self._missed.items() if key[0] in nodes}
        self._answered = {node: one for node, one in self._answered.items() if node in nodes}
        newest = {call for _, call in self._registry.adapters.all_calls()}
        self._tries = {
            (node, call): tries
            for (node, call), tries in self._tries.items()
            if node in nodes and call in newest
        }


def _request(call: AdapterCall) -> LoadAdapterRequest | UnloadAdapterRequest:
    if not call.digest:
        return UnloadAdapterRequest(name=call.name, version=call.version, model=call.model)
    return LoadAdapterRequest(
        name=call.name,
        path=call.path,
        in_place=True,
        version=call.version,
        digest=call.digest,
        model=call.model,
    )
