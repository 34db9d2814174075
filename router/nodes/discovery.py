"""Finds out which nodes there are: static ones, those of DNS names, those of services.

Discovery says who may exist; reports and requests say who is used. So an answer is believed when
it adds a node and doubted when it takes one away:

    1. found        a name or service has the address: the node is a member
    2. missing      it no longer has: still a member while it reports, for at most `linger_s`
    3. gone         it stopped reporting, or the time is over
    -  leaving      Kubernetes ends the pod: a member for as long as a missing one, but gets
                    requests only when no other node can take them
    An empty or failed answer changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from edge.address import look_up
from router.kubernetes.endpoint_slices import Endpoints
from router.nodes.address import NodeAddress, NodeEntry, NodeSource

logger = logging.getLogger(__name__)

_MAX_LOGGED = 50
"""Nodes named in one line."""

Resolver = Callable[[str], Awaitable[Sequence[str]]]
"""Name to IP addresses. Raises `OSError` or `UnicodeError` when it cannot be resolved."""


Watcher = Callable[[str, Callable[[Endpoints], None]], Awaitable[None]]
"""Tells of the endpoints of a Kubernetes service, until cancelled."""


async def no_kubernetes(service: str, on_endpoints: Callable[[Endpoints], None]) -> None:
    """Refuses to watch: there is no cluster around this router."""


async def resolve_host(name: str) -> Sequence[str]:
    found = await look_up(name)
    return sorted({str(info[4][0]) for info in found})


class Discovery:
    """Calls `on_members` with all members, and those of them that are leaving, whenever they
    change, at least once; and `on_failure` when a name leads nowhere."""

    def __init__(
        self,
        entries: Sequence[NodeEntry],
        on_members: Callable[[set[NodeAddress], set[NodeAddress]], None],
        is_alive: Callable[[NodeAddress], bool],
        on_failure: Callable[[], None],
        *,
        interval_s: float = 5.0,
        linger_s: float = 30.0,
        resolve: Resolver = resolve_host,
        watch: Watcher = no_kubernetes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        by_source = {s: [entry for entry in entries if entry.source is s] for s in NodeSource}
        self._static = {entry.address() for entry in by_source[NodeSource.STATIC]}
        self._names = by_source[NodeSource.DNS]
        self._services = by_source[NodeSource.KUBERNETES]
        self._on_members = on_members
        self._is_alive = is_alive
        self._on_failure = on_failure
        self._interval_s = interval_s
        self._linger_s = linger_s
        self._resolve = resolve
        self._watch = watch
        self._clock = clock
        self._last_seen: dict[NodeEntry, dict[NodeAddress, float]] = {
            entry: {} for entry in (*self._names, *self._services)
        }
        self._present: dict[NodeEntry, set[NodeAddress]] = {}
        """The nodes by the last answer."""
        self._leaving: dict[NodeEntry, set[NodeAddress]] = {}
        self._announced: tuple[set[NodeAddress], set[NodeAddress]] | None = None

    async def run(self) -> None:
        """Runs until cancelled; returns at once when all nodes are static."""
        if self._static or not self.dynamic:
            self._announce()
        async with asyncio.TaskGroup() as tasks:
            for entry in self._services:
                tasks.create_task(self._follow_service(entry))
            for entry in self.dynamic:
                tasks.create_task(self._keep_looking(entry))

    @property
    def dynamic(self) -> list[NodeEntry]:
        """Returns the entries whose nodes may change."""
        return [*self._names, *self._services]

    async def look(self, entry: NodeEntry) -> None:
        """Looks a name up; of a name and a service alike, forgets what it has no longer."""
        if entry.source is NodeSource.DNS:
            await self._resolve_entry(entry)
        else:
            self._drop_missing(entry)
        self._announce()

    async def _keep_looking(self, entry: NodeEntry) -> None:
        """Looks at each by itself: a name whose servers are silent takes many seconds."""
        while True:
            await self.look(entry)
            await asyncio.sleep(self._interval_s)

    def _announce(self) -> None:
        members = self._static.union(*self._last_seen.values())
        leaving = members & set().union(*self._leaving.values())
        if (members, leaving) != self._announced:
            before, _ = self._announced or (set(), set())
            self._announced = (members, leaving)
            if members != before or not members:
                _log_changes(before, members)
            self._on_members(members, leaving)

    async def _follow_service(self, entry: NodeEntry) -> None:
        await self._watch(entry.host, lambda endpoints: self._take_endpoints(entry, endpoints))

    def _take_endpoints(self, entry: NodeEntry, endpoints: Endpoints) -> None:
        """Takes what the watch tells. Whatever is missing now was there until now."""
        self._drop_missing(entry)
        self._present[entry] = {entry.address(host) for host in endpoints.present}
        self._leaving[entry] = {entry.address(host) for host in endpoints.terminating}
        self._drop_missing(entry)
        self._announce()

    async def _resolve_entry(self, entry: NodeEntry) -> None:
        try:
            hosts = await self._resolve(entry.host)
        except (OSError, UnicodeError) as error:
            logger.warning("cannot resolve %s: %s", entry.host, error)
            hosts = ()
        if not hosts:
            self._on_failure()
            self._see_present(entry)
            return
        self._present[entry] = {entry.address(host) for host in hosts}
        self._drop_missing(entry)

    def _drop_missing(self, entry: NodeEntry) -> None:
        now = self._see_present(entry)
        self._last_seen[entry] = {
            address: last
            for address, last in self._last_seen[entry].items()
            if self._stays(address, now - last)
        }

    def _see_present(self, entry: NodeEntry) -> float:
        """Takes what the last answer has for seen until now. Returns the time."""
        now = self._clock()
        self._last_seen[entry].update(dict.fromkeys(self._present.get(entry, ()), now))
        return now

    def _stays(self, address: NodeAddress, missing_s: float) -> bool:
        return missing_s == 0 or (missing_s < self._linger_s and self._is_alive(address))


def _log_changes(before: set[NodeAddress], members: set[NodeAddress]) -> None:
    """Logs who came and who went: the whole list of a large cluster would be logged with each of
    its pods."""
    new, gone = sorted(map(str, members - before)), sorted(map(str, before - members))
    changes = [(sign + name) for sign, names in (("+", new), ("-", gone)) for name in names]
    shown = " ".join(changes[:_MAX_LOGGED])
    more = f" and {len(changes) - _MAX_LOGGED} more" if len(changes) > _MAX_LOGGED else ""
    logger.info("%d members: %s%s", len(members), shown or "none", more)
