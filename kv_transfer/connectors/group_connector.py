"""The connectors of several data-parallel groups of one node, as the engine core watches them.

Each group exchanges KV by itself, with transfer processes of its own, and peers know it as an
engine of its own: blocks of one group mean nothing in another.
"""

from __future__ import annotations

import select
from collections.abc import Sequence

import msgspec

from kv_transfer.base import KVConnectorScheduler
from kv_transfer.metadata import KVConnectorOutput, KVPeer


class GroupEvents(KVConnectorOutput, kw_only=True):
    """Holds what connectors have to say, by group; None: nothing."""

    by_group: tuple[KVConnectorOutput | None, ...] = ()


class GroupConnector:
    """Has of a `KVConnectorScheduler` what is not about one request."""

    def __init__(self, connectors: Sequence[KVConnectorScheduler]) -> None:
        self.groups = connectors
        self._ready = select.epoll()
        for connector in connectors:
            self._ready.register(connector.fileno(), select.EPOLLIN)

    @property
    def check_interval_s(self) -> float:
        return min(connector.check_interval_s for connector in self.groups)

    @property
    def peer_info(self) -> KVPeer | None:
        """Returns the node as peers must know it, with all groups."""
        first, *others = (connector.peer_info for connector in self.groups)
        if first is None:
            return None
        groups = tuple(one for one in others if one)
        return msgspec.structs.replace(first, groups=groups, names_group=True)

    @property
    def process_pids(self) -> list[int]:
        return [pid for connector in self.groups for pid in connector.process_pids]

    @property
    def counters(self) -> dict[str, float]:
        """Returns the totals of all groups."""
        totals: dict[str, float] = {}
        for connector in self.groups:
            for name, count in connector.counters.items():
                totals[name] = totals.get(name, 0) + count
        return totals

    def fileno(self) -> int:
        return self._ready.fileno()

    def get_finished(self) -> GroupEvents | None:
        """Takes what has arrived. None when there was nothing."""
        found = [connector.get_finished() for connector in self.groups]
        return GroupEvents(by_group=tuple(found)) if any(one is not None for one in found) else None

    def check_alive(self) -> None:
        for connector in self.groups:
            connector.check_alive()

    def shutdown(self) -> None:
        """Idempotent."""
        for connector in self.groups:
            connector.shutdown()
        self._ready.close()
