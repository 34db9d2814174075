"""Keeps a long-lived `Watch` call to every member: how loaded it is, and whether it is alive.

1. a member appears: a task calls `Watch`, each time on a channel of its own, which shows what
   certificates say by then
2. each report goes to the registry, which keeps only what is newer; what newer ones say of
   answers that another router ends goes to `on_aborts`
3. a stream that ends, breaks or falls silent marks the node disconnected; the call is made
   again after a short random pause, for as long as the node is a member
4. a member vanishes: its task is cancelled

The more members there are, the further apart reports are asked for: a router takes a tenth of a
millisecond for each, and nodes have two for every prompt, whichever router it came from.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import grpc.aio

from edge.grpc_answers import GarbledAnswer, QuietChannel, readable, words_of
from edge.http.event_loop.long_work import pause
from edge.security.config import PlaintextRefused, Role
from edge.security.credentials import Credentials, idle_channel
from edge.standstill import is_done_within
from router.nodes.adapter_set import NO_ADAPTERS
from router.nodes.address import NodeAddress, NodeRole
from router.nodes.registry import NodeRegistry, ReportOutcome
from router.nodes.report import NodeReport
from tandem_pb.node_pb2 import AbortCall, NodeLoad, WatchRequest
from tandem_pb.node_pb2_grpc import NodeStatusStub

logger = logging.getLogger(__name__)

_MIN_PAUSE_S = 0.2
_MAX_PAUSE_S = 1.0
"""A node that comes back is missed by answers that wait for one."""
_MOST_REPORTS_PER_S = 2000
"""Takes a fifth of a core. Up to 40 nodes are asked for as many as they send."""
_SOONEST_CHANGE_S = 0.02
"""Nodes send no two reports in less."""
_CLOSEST = 0.9
_STEPS = 4
"""Silence is measured in this many short sleeps, so a stall of this process costs at most one."""

_MOST_REPORT_BYTES = 4 << 20
"""Holds 4096 adapters with the longest names, which take 2.4 MB."""
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", _MOST_REPORT_BYTES),
)
_REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED", "SSL", "handshake")


AbortListener = Callable[[NodeAddress, Iterable[AbortCall]], None]


class WatchEvents(Protocol):
    """Records what becomes of the watches."""

    def watch_failed(self, role: NodeRole) -> None: ...

    def report_came(self, outcome: ReportOutcome) -> None: ...


class LoadMonitor:
    """Watches nodes, each by a task of its own, and gives the registry what they report."""

    def __init__(
        self,
        registry: NodeRegistry,
        events: WatchEvents,
        interval_s: float,
        credentials: Credentials,
        on_aborts: AbortListener,
        rng: random.Random | None = None,
    ) -> None:
        self._registry = registry
        self._events = events
        self._interval_s = interval_s
        self._silence_s = registry.patience.stale_after_s
        self._credentials = credentials
        self._on_aborts = on_aborts
        self._rng = rng or random.Random()
        self._tasks: dict[NodeAddress, asyncio.Task[None]] = {}
        self._idle: grpc.aio.Channel | None = None
        """Is open while nodes are watched, also if none is reached."""
        self._opening = asyncio.Lock()
        """Has one of its pieces of work in line for a turn of the event loop."""
        self._refusals: dict[NodeAddress, str] = {}
        """Reasons that were reported."""

    def set_members(
        self, addresses: Iterable[NodeAddress], leaving: Collection[NodeAddress] = ()
    ) -> None:
        """Watches exactly `addresses` from now on, and makes them the registry's members."""
        members = set(addresses)
        if self._idle is None:
            self._idle = idle_channel()
        self._registry.set_members(members, leaving)
        for address in self._tasks.keys() - members:
            self._tasks.pop(address).cancel()
            self._refusals.pop(address, None)
        for address in members - self._tasks.keys():
            self._tasks[address] = asyncio.create_task(
                self._watch(address), name=f"watch {address.role} {address}"
            )

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._idle is not None:
            await self._idle.close()
            self._idle = None

    async def _watch(self, address: NodeAddress) -> None:
        pause_s = _MIN_PAUSE_S
        while True:
            try:
                num_reports = await self._call(address)
            except PlaintextRefused as error:
                logger.error("%s node %s is not watched: %s", address.role, address, error)
                return
            except Exception:
                # Whatever a peer sends, the watch goes on: without it the node is lost to us.
                logger.exception("%s node %s: watching failed", address.role, address)
                num_reports = 0
            if num_reports > 0:
                pause_s = _MIN_PAUSE_S
            self._registry.mark_disconnected(address)
            self._events.watch_failed(address.role)
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _call(self, address: NodeAddress) -> int:
        """Makes one connection; returns how many reports came."""
        role = Role(address.role)
        async with self._opening:  # A thousand nodes may appear at once; a channel takes 1 ms.
            await pause()
        await self._credentials.meet(address.status_target)
        async with self._credentials.channel(address.status_target, role, _OPTIONS) as channel:
            stub = NodeStatusStub(QuietChannel(channel))  # type: ignore[no-untyped-call]
            return await self._follow(stub, address)

    async def _follow(self, stub: NodeStatusStub, address: NodeAddress) -> int:
        """Reads one stream until it ends; returns how many reports came."""
        num_reports, adapters, request = 0, NO_ADAPTERS, self._request()
        call = stub.Watch(request, metadata=self._credentials.metadata())
        try:
            while True:
                if self._wants_others(request):
                    call.cancel()
                    adapters, request = NO_ADAPTERS, self._request()
                    call = stub.Watch(request, metadata=self._credentials.metadata())
                load = readable(await self._read(call))
                if not isinstance(load, NodeLoad):
                    logger.info("%s node %s ended its reports", address.role, address)
                    return num_reports
                num_reports += 1
                report = NodeReport.from_message(load, adapters)
                adapters = report.adapters
                self._take(address, report, load.abort_calls)
        except TimeoutError:
            self._log_loss(address, num_reports, "it has fallen silent")
        except GarbledAnswer as error:
            self._log_loss(address, num_reports, str(error), is_refusal=True)
        except grpc.aio.AioRpcError as error:
            reason = words_of(error)
            is_refusal = any(word in reason for word in _REFUSALS)
            self._log_loss(address, num_reports, reason, is_refusal=is_refusal)
        finally:
            call.cancel()
        return num_reports

    @property
    def _spacing_s(self) -> float:
        """Returns how far apart the reports of a node have to be, so that all are few enough."""
        return len(self._tasks) / _MOST_REPORTS_PER_S

    def _wants_others(self, request: WatchRequest) -> bool:
        """Returns whether reports should come much further apart than asked for, or much closer."""
        asked_s = max(request.change_interval_s, _SOONEST_CHANGE_S)
        wanted_s = max(self._spacing_s, _SOONEST_CHANGE_S)
        return wanted_s > 2 * asked_s or asked_s > 2 * wanted_s

    def _request(self) -> WatchRequest:
        spacing_s = self._spacing_s
        # A report of a change tells more than one that comes because its time has. But three of
        # these fit into the silence that makes a node suspect, whatever the number of nodes.
        rarest_s = self._silence_s / 3
        interval_s = max(self._interval_s, min(2 * spacing_s, rarest_s))
        # Watches begin together: at equal distances, the reports of all nodes would stay together.
        return WatchRequest(
            interval_s=interval_s * self._rng.uniform(_CLOSEST, 1.0),
            keeps_adapters=True,
            takes_adapter_changes=True,
            change_interval_s=spacing_s,
        )

    async def _read(self, call: Any) -> object:
        """Returns what comes next. Raises `TimeoutError` when that is nothing for too long."""
        reading = asyncio.ensure_future(call.read())
        try:
            if not await is_done_within(self._silence_s, _STEPS, reading):
                raise TimeoutError
            return reading.result()
        finally:
            reading.cancel()
            del reading  # Its error holds this frame, which must not hold the error.

    def _log_loss(
        self, address: NodeAddress, num_reports: int, reason: str, *, is_refusal: bool = False
    ) -> None:
        """Logs a lost watch. A node that is away stays away for many attempts: its leaving is news,
        and that it does not believe us, or we it."""
        is_news = num_reports > 0 or (is_refusal and self._refusals.get(address) != reason)
        if is_refusal:
            self._refusals[address] = reason
        level = logging.WARNING if is_news else logging.DEBUG
        logger.log(level, "%s node %s: no more reports: %s", address.role, address, reason)

    def _take(
        self, address: NodeAddress, report: NodeReport, abort_calls: Iterable[AbortCall]
    ) -> None:
        outcome = self._registry.take_report(address, report)
        self._events.report_came(outcome)
        if outcome in (ReportOutcome.APPLIED, ReportOutcome.RESTARTED):
            self._on_aborts(address, abort_calls)
