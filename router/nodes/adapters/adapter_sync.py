"""Brings nodes up to date that missed calls about adapters: they started, or came back, later.

A node is behind in a name if it has not followed the newest call that the registry's ledger knows.

    behind ──its turn──▶ asked ──▶ followed: it says so in its reports, or has said so in its answer
      ▲                    │
      └── pause of 1 .. 60 s ◀── it could not: its fault is logged

Turns follow the tiers: a decode node loads an adapter once a prefill node that works for it has it,
or if there is none at all; a prefill node unloads one when no decode node has it any more. Each
node loads one adapter at a time, the next as soon as one is there, and unloads a few: one takes
as long as its requests.
Several routers may ask for the same: the version says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice

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
_MOST_LOOKS, _LEAST_LOOKS = 10_000, 8
"""Calls that one step looks at, of all nodes that are behind and of one: a tier that has started
anew has missed hundreds of thousands, and all else waits meanwhile."""
_MOST_UNLOADS = 8
"""Counts those of one node that are asked at once: each is a connection."""
_IN_TOUCH = (NodeState.READY, NodeState.HALF_OPEN, NodeState.EJECTED, NodeState.DRAINED)


@dataclass(slots=True)
class _Tries:
    """Says when a node is asked again for one call."""

    retry_at: float
    pause_s: float = _FIRST_PAUSE_S


@dataclass(slots=True)
class _Missed:
    """Holds the calls that a node has not followed, by name: of the first `num_known` of its model,
    when it had said `num_said`. Only what is new of both is looked at. A call that was looked at in
    vain stands behind the others."""

    num_known: int = 0
    num_said: int = 0
    loads: dict[str, AdapterCall] = field(default_factory=dict)
    unloads: dict[str, AdapterCall] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.loads) + len(self.unloads)

    def note(self, call: AdapterCall) -> None:
        self.drop(call.name)
        (self.loads if call.digest else self.unloads)[call.name] = call

    def drop(self, name: str) -> None:
        self.loads.pop(name, None)
        self.unloads.pop(name, None)

    def find(self, name: str) -> AdapterCall | None:
        return self.loads.get(name) or self.unloads.get(name)


class _Tiers:
    """Says what there is on nodes that stand in for each other, as of one look, in which each node
    that is behind has `num_looks` at its calls."""

    def __init__(self, registry: NodeRegistry, num_looks: int) -> None:
        self.num_looks = num_looks
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
            self._names[fingerprint] = set[str]().union(*(one.by_name for one in sets))
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
    _tiers: _Tiers | None = None
    """Is of the last step."""

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
        behind = list(self._behind())
        num_looks = max(_LEAST_LOOKS, _MOST_LOOKS // max(1, len(behind)))
        self._tiers = tiers = _Tiers(self._registry, num_looks)
        num_unloads = Counter(node for node, name in self._busy if name)
        for node, missed in behind:
            num_free = _MOST_UNLOADS - num_unloads[node]
            self._ask_some(node, missed.unloads, tiers, num_free)
            if (node, "") not in self._busy:
                self._ask_some(node, missed.loads, tiers, 1)

    def num_behind(self) -> dict[NodeRole, int]:
        """Returns how many calls the nodes of each tier have not followed yet."""
        behind: Counter[NodeRole] = Counter()
        for node, missed in self._behind():
            behind[node.address.role] += len(missed)
        return {role: behind[role] for role in NodeRole}

    @property
    def _registry(self) -> NodeRegistry:
        return self.adapters.registry

    def _behind(self) -> Iterator[tuple[Node, _Missed]]:
        """Yields the nodes in touch that have not followed some calls, and those of each model."""
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
            self._update(missed, node, model)
            if missed:
                yield node, missed

    def _update(self, missed: _Missed, node: Node, model: str) -> None:
        """Takes in the calls that are new, and those that a node has said to have followed."""
        new, missed.num_known = self._registry.adapters.since(model, missed.num_known)
        is_fresh = not node.followed and node not in self._answered
        for call in new:
            if not is_fresh and self._follows(node, call):
                missed.drop(call.name)
            else:
                missed.note(call)
        num_new, missed.num_said = node.num_followed - missed.num_said, node.num_followed
        for said in islice(reversed(node.followed.values()), num_new):
            known = missed.find(said.name)
            if known is not None and said.order >= known.order:
                missed.drop(said.name)

    def _follows(self, node: Node, call: AdapterCall) -> bool:
        """Returns whether a node has followed a call or a newer one, as far as it has said."""
        name = call.name
        said = (node.followed.get(name), self._answered.get(node, {}).get(name))
        return any(one is not None and one.order >= call.order for one in said)

    def _ask_some(
        self,
        node: Node,
        missed: dict[str, AdapterCall],
        tiers: _Tiers,
        num_free: int,
    ) -> None:
        """Looks at some calls that a node has missed, and asks it to follow `num_free` at most."""
        for call in list(islice(missed.values(), tiers.num_looks)):
            if num_free <= 0:
                return
            del missed[call.name]
            if self._registry.adapters.calls(call.model).get(call.name) is not call:
                continue
            missed[call.name] = call
            key = node, "" if call.digest else call.name
            if key not in self._busy and self._is_turn(node, call, tiers):
                self._busy[key] = asyncio.create_task(self._bring(key, call))
                num_free -= 1

    def _is_turn(self, node: Node, call: AdapterCall, tiers: _Tiers) -> bool:
        """Returns whether a node may be asked now."""
        tries = self._tries.get((node, call))
        if tries is not None and self._registry.clock() < tries.retry_at:
            return False
        if (call.model, call.name) in self.adapters.changing:
            return False
        is_prefill = node.address.role is NodeRole.PREFILL
        if not call.digest:
            return not (is_prefill and call.name in tiers.answered(node))
        computed = None if is_prefill else tiers.computed(node)
        return computed is None or call.digest in computed

    async def _bring(self, key: tuple[Node, str], call: AdapterCall) -> None:
        """Asks a node to follow a call, and once it has loaded an adapter, to load its next."""
        node = key[0]
        try:
            answer = await self.adapters.asker.ask(node, _request(call))
        except Exception as error:
            logger.exception("%s node %s could not be asked", node.address.role, node.address)
            answer = failure(type(error).__name__)
        finally:
            del self._busy[key]
        self._handle_answer(node, call, answer)
        missed = self._missed.get((node, call.model))
        if call.digest and not answer.failed and missed is not None and self._tiers is not None:
            self._ask_some(node, missed.loads, self._tiers, 1)

    def _handle_answer(self, node: Node, call: AdapterCall, answer: NodeAnswer) -> None:
        key = node, call
        if not answer.failed:
            self._tries.pop(key, None)
            self._answered.setdefault(node, {})[call.name] = call
            self._drop(node, call)
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

    def _drop(self, node: Node, call: AdapterCall) -> None:
        """Notes that a node misses a call no longer."""
        missed = self._missed.get((node, call.model))
        if missed is not None and missed.find(call.name) is call:
            missed.drop(call.name)

    def _forget(self) -> None:
        """Forgets nodes that have gone, and calls that newer ones have replaced."""
        nodes = set(self._registry.all_nodes())
        self._missed = {key: missed for key, missed in self._missed.items() if key[0] in nodes}
        self._answered = {node: one for node, one in self._answered.items() if node in nodes}
        calls = self._registry.adapters.calls
        self._tries = {
            (node, call): tries
            for (node, call), tries in self._tries.items()
            if node in nodes and calls(call.model).get(call.name) == call
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
