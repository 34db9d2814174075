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
from collections.abc import Iterator
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


@dataclass(slots=True, kw_only=True)
class AdapterSync:
    """Asks nodes, in tasks of its own. `step` starts what is due."""

    adapters: ClusterAdapters
    _busy: dict[tuple[Node, str], asyncio.Task[None]] = field(default_factory=dict)
    """Holds what is being asked: one load of a node, under "", and unloads by their names."""
    _answered: dict[Node, dict[str, AdapterCall]] = field(default_factory=dict)
    _tries: dict[tuple[Node, AdapterCall], _Tries] = field(default_factory=dict)

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
        calls = self._registry.adapters.calls
        decodes = [one for one in self._registry.nodes(NodeRole.DECODE) if calls(one.model)]
        groups = by_weights(self._registry.nodes(NodeRole.PREFILL)) if decodes else {}
        models = {(node, node.model): None for node in decodes}
        models |= {(prefill, d.model): None for d in decodes for prefill in partners_of(d, groups)}
        for node, model in models:
            if node.report is None or self._registry.state(node) not in _IN_TOUCH:
                continue
            answered = self._answered.get(node, {})
            for name, call in calls(model).items():
                followed = (node.followed.get(name), answered.get(name))
                newest = max((one.order for one in followed if one is not None), default=(0, ""))
                if newest < call.order and (model, name) not in self.adapters.changing:
                    yield node, call

    def _turns(self) -> Iterator[tuple[Node, AdapterCall]]:
        """Yields what of it may be done now."""
        groups = by_weights(self._registry.nodes(NodeRole.PREFILL))
        decodes = self._registry.nodes(NodeRole.DECODE)
        for node, call in self._behind():
            is_prefill = node.address.role is NodeRole.PREFILL
            if call.digest and not is_prefill and not self._is_computed(node, call, groups):
                continue
            if not call.digest and is_prefill and self._is_wanted(node, call, decodes):
                continue
            yield node, call

    def _is_computed(
        self, decode: Node, call: AdapterCall, groups: dict[Weights, list[Node]]
    ) -> bool:
        """Returns whether a prefill node has the adapter, or there is none that could."""
        partners = [n for n in partners_of(decode, groups) if self._registry.usable_of([n])]
        return not partners or any(node.has_weights(call.digest) for node in partners)

    def _is_wanted(self, prefill: Node, call: AdapterCall, decodes: list[Node]) -> bool:
        """Returns whether decode nodes in touch still answer by the name."""
        return any(
            one.name == call.name
            for node in decodes
            if node.fingerprint == prefill.fingerprint and self._registry.state(node) in _IN_TOUCH
            for one in node.adapters
        )

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
