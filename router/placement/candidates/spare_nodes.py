"""Finds capacity that nothing else uses, for requests that may have nothing else.

    look       several times a second: of each model, how many prefill nodes have no other work. The
               least of the last `window_s` is what nothing used
    prefill    of those, all but a reserve: each takes prompts up to `step_tokens` at once. What
               comes finds as many free nodes as it has needed lately, and the reserve besides
    decode     nodes with room in their KV cache, on which no other request waits: up to
               `max_per_decode`, and `max_beside` where prompts of others were computed in the room
               of steps in the last `window_s`: each makes the steps of others longer, so that
               these stay longer and leave less room for such prompts
    local      a decode node computes a prompt itself where its steps have room for it, or where
               nothing but such requests was on it for `window_s`

Prompts of others never wait behind such a prompt on a node that they would have had to themselves,
unless more of them come at once than in the whole window.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from router.nodes.address import NodeRole
from router.nodes.node import Node
from router.nodes.partners import decodes_of, prefills_of
from router.nodes.registry import NodeRegistry

_SLOTS = 10
"""Parts of the window, each with its own least number."""
_MAX_KV_USAGE = 0.6
_BLIND_S = 1.0
"""The longest gap between two looks: behind a longer one the window begins anew."""
_work = attrgetter("predicted_tokens")


@dataclass(slots=True)
class _LeastFree:
    """Is the least number of free nodes seen in the last looks. `slots`: begin of a part of the
    window, and the least number in it."""

    since: float
    seen_at: float
    slots: deque[tuple[float, int]] = field(default_factory=deque)

    def note(self, num_free: int, now: float, window_s: float) -> None:
        if now - self.seen_at > _BLIND_S:
            self.since = now
            self.slots.clear()
        self.seen_at = now
        if self.slots and now - self.slots[-1][0] < window_s / _SLOTS:
            began, least = self.slots[-1]
            self.slots[-1] = (began, min(least, num_free))
        else:
            self.slots.append((now, num_free))
        while now - self.slots[0][0] > window_s:
            self.slots.popleft()

    def least(self, now: float, window_s: float) -> int:
        """Returns 0 while the window is not over, or nothing looks."""
        if now - self.since < window_s or now - self.seen_at > _BLIND_S:
            return 0
        return min(num_free for _, num_free in self.slots)


@dataclass(slots=True, kw_only=True)
class SpareNodes:
    """Knows them, as far as this router does. `reserve`: part of the prefill nodes of a model that
    stays free, at least one."""

    registry: NodeRegistry
    window_s: float = 10.0
    reserve: float = 0.1
    step_tokens: int = 2048
    max_per_decode: int = 32
    max_beside: int = 6
    _free: dict[str, _LeastFree] = field(default_factory=dict)
    _used_at: dict[Node, float] = field(default_factory=dict)
    _prompt_at: dict[Node, float] = field(default_factory=dict)
    """When a node was last seen with a prompt of others, of those that have had one."""

    def look(self) -> None:
        """Notes which nodes have other work now."""
        now = self.registry.clock()
        busy = {node: self._is_busy(node) for node in self.registry.all_nodes()}
        self._used_at = {
            node: now if is_busy else self._used_at.get(node, now) for node, is_busy in busy.items()
        }
        self._prompt_at = {
            node: now if node.work.had_prompt else self._prompt_at[node]
            for node in busy
            if node.work.had_prompt or node in self._prompt_at
        }
        for node in busy:
            node.work.had_prompt = False
        free: defaultdict[str, int] = defaultdict(int)
        for node in self.registry.usable(NodeRole.PREFILL):
            free[node.model] += not busy[node]
        for model, num_free in free.items():
            known = self._free.setdefault(model, _LeastFree(now, now))
            known.note(num_free, now, self.window_s)
        for model in self._free.keys() - free.keys():
            del self._free[model]

    def prefills(self, nodes: Sequence[Node]) -> list[Node]:
        """Returns those of a model's prefill nodes that may compute such a prompt now, the least
        loaded first."""
        known = self._free.get(nodes[0].model) if nodes else None
        if known is None:
            return []
        least = known.least(self.registry.clock(), self.window_s)
        num_spare = least - max(1, math.ceil(self.reserve * len(nodes)))
        if num_spare <= 0:
            return []
        free = [node for node in nodes if node.health.accepts and not node.serves_others]
        # What has such prompts already is one of the spare ones.
        free.sort(key=_work, reverse=True)
        return sorted((n for n in free[:num_spare] if _work(n) < self.step_tokens), key=_work)

    def decodes(self, nodes: Iterable[Node], num_kv_tokens: int) -> list[Node]:
        """Returns those decode nodes that may take such a request."""
        return [node for node in nodes if self._has_room(node, num_kv_tokens)]

    def may_compute(self, decode: Node) -> bool:
        """Returns whether a decode node may compute such a prompt itself. In the room beside other
        answers it has one at a time: prompts of others may be computed there as well."""
        if decode.report is None or _work(decode) >= self.step_tokens:
            return False
        now = self.registry.clock()
        if now - self._used_at.get(decode, now) >= self.window_s:
            return True
        return decode.report.slack_tokens_per_s > 0 and _work(decode) == 0

    def free_tokens(self, model: str) -> int:
        """Returns about how many prompt tokens may be begun now."""
        own = self._decodes_of(model)
        decodes = self.decodes(own, 0)
        if not decodes:
            return 0
        nodes = prefills_of(model, self.registry.usable(NodeRole.PREFILL), own)
        computing = self.prefills(nodes) or [n for n in decodes if self.may_compute(n)]
        return sum(max(0, self.step_tokens - _work(node)) for node in computing)

    def num_rooms(self, model: str) -> int:
        """Returns how many such requests decode nodes may have besides those that they have."""
        decodes = self.decodes(self._decodes_of(model), 0)
        return sum(self._most(node) - _num_idle(node) for node in decodes)

    def _decodes_of(self, model: str) -> list[Node]:
        return decodes_of(model, self.registry.usable(NodeRole.DECODE))

    def _has_room(self, decode: Node, num_kv_tokens: int) -> bool:
        report = decode.report
        if report is None or not decode.health.accepts or _num_idle(decode) >= self._most(decode):
            return False
        others_wait = report.num_waiting_requests > 0 and decode.serves_others
        return not others_wait and decode.kv_usage_with(num_kv_tokens) <= _MAX_KV_USAGE

    def _most(self, decode: Node) -> int:
        """Returns how many such requests a decode node may have."""
        has_room = decode.report is not None and decode.report.slack_tokens_per_s > 0
        since = self.registry.clock() - self._prompt_at.get(decode, -math.inf)
        return self.max_beside if has_room and since < self.window_s else self.max_per_decode

    def _is_busy(self, node: Node) -> bool:
        is_busy = node.serves_others
        node.work.was_used = False
        return is_busy


def _num_idle(node: Node) -> int:
    reported = node.report.num_idle_requests if node.report is not None else 0
    return max(reported, node.work.idle_requests)
