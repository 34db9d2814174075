"""Notices that what one node is asked for no longer fits its cache while others have room.

Prompts with one long beginning all go to the node that has it. At a low load its queue never drives
any of them away, so their ends evict each other there, are computed again and again, and other
caches stay empty. One request alone never gains by leaving: it would compute the whole beginning.
So the waste is added up, and when it has reached what the beginning costs, one request pays for it:
rent until it comes to the price, then buy, which never costs more than twice the best possible.

1. missed    a node had to compute what it was known to have: its time counts as wasted there
2. spread    as much is wasted as a prompt costs more on a node with room: it goes there, which
             has the beginning from then on, and the account begins anew
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from router.nodes.node import Node


@dataclass(slots=True)
class Crowding:
    _wasted_s: dict[Node, float] = field(default_factory=dict)

    def missed(self, node: Node, seconds: float) -> None:
        self._wasted_s[node] = self._wasted_s.get(node, 0.0) + seconds

    def pays(self, node: Node, price_s: float) -> bool:
        """Returns whether `node` has wasted as much as that, and if so begins anew."""
        if not 0 < price_s <= self._wasted_s.get(node, 0.0):
            return False
        del self._wasted_s[node]
        return True

    def retain(self, nodes: Collection[Node]) -> None:
        """Forgets all nodes but these."""
        self._wasted_s = {node: s for node, s in self._wasted_s.items() if node in nodes}
