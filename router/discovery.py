"""Which nodes there are: the static ones, and those that DNS names resolve to.

Discovery says who may exist; reports and requests say who is used. So an answer is believed when
it adds a node and doubted when it takes one away:

    1. resolved     a name's address appears: the node is a member
    2. missing      the name no longer has the address: still a member while it reports, for at
                    most `linger_s`
    3. gone         it stopped reporting, or the time is over
    An empty or failed resolution changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence

from router.metrics import RouterMetrics
from router.node_address import NodeAddress, NodeEntry

logger = logging.getLogger(__name__)

Resolver = Callable[[str], Awaitable[Sequence[str]]]
"""Name to IP addresses. Raises `OSError` or `UnicodeError` when it cannot be resolved."""


async def resolve_host(name: str) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return sorted({str(info[4][0]) for info in found})


class Discovery:
    """Calls `on_members` with all members whenever they change, at least once."""

    def __init__(
        self,
        entries: Sequence[NodeEntry],
        on_members: Callable[[set[NodeAddress]], None],
        is_alive: Callable[[NodeAddress], bool],
        metrics: RouterMetrics,
        *,
        interval_s: float = 5.0,
        linger_s: float = 30.0,
        resolve: Resolver = resolve_host,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._static = {entry.address() for entry in entries if not entry.dns}
        self._names = [entry for entry in entries if entry.dns]
        self._on_members = on_members
        self._is_alive = is_alive
        self._metrics = metrics
        self._interval_s = interval_s
        self._linger_s = linger_s
        self._resolve = resolve
        self._clock = clock
        self._last_seen: dict[NodeEntry, dict[NodeAddress, float]] = {
            entry: {} for entry in self._names
        }
        self._members: set[NodeAddress] | None = None

    async def run(self) -> None:
        """Runs until cancelled; returns at once when no name needs resolving."""
        await self.refresh()
        while self._names:
            await asyncio.sleep(self._interval_s)
            await self.refresh()

    async def refresh(self) -> None:
        for entry in self._names:
            await self._refresh_entry(entry)
        members = self._static.union(*self._last_seen.values())
        if members != self._members:
            self._members = members
            logger.info("members: %s", ", ".join(sorted(map(str, members))) or "none")
            self._on_members(members)

    async def _refresh_entry(self, entry: NodeEntry) -> None:
        try:
            hosts = await self._resolve(entry.host)
        except (OSError, UnicodeError) as error:
            logger.warning("cannot resolve %s: %s", entry.host, error)
            hosts = ()
        if not hosts:
            self._metrics.discovery_failures.inc()
            return
        now = self._clock()
        seen = self._last_seen[entry]
        seen.update({entry.address(host): now for host in hosts})
        self._last_seen[entry] = {
            address: last for address, last in seen.items() if self._stays(address, now - last)
        }

    def _stays(self, address: NodeAddress, missing_s: float) -> bool:
        return missing_s == 0 or (missing_s < self._linger_s and self._is_alive(address))
