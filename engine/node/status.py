"""Tells about a node: load reports, and whether it is healthy.

Both kinds of node serve `NodeStatus.Watch`: one report at once, one every interval, and one soon
after every change (`notify`), at most every 20 ms.

A report says that the engine lives, too: while one of its processes gives no sign of life, none is
sent, and the router moves answers as from a node that is frozen as a whole:

    silent for 1 s               no reports, no comments on answers
    silent for `frozen_after_s`  a fault: health says so, new requests are refused
    silent for `stuck_after_s`,  the engine is given up, and the node ends
    or work and no step as long
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import grpc

from edge.installed_version import installed_version
from edge.tracing.environment import host_name
from engine.contracts.errors import EngineCallTimeout, EngineDeadError
from engine.frontend.step_history import StepHistory
from engine.kv_cache.capacity import tokens_that_fit
from engine.node.metrics.engine_metrics import MeasuredEngine
from engine.node.services.abort_calls import AbortCalls, EndAnswers
from engine.node.services.adapter_reports import AdapterReports, add_adapters
from engine.node.services.adapter_servicer import adapter_call
from engine.node.services.profile_servicer import ProfiledEngine
from engine.node.services.role_servicer import RoleServicer
from engine.node.services.role_switch import RoleSwitch
from host.life_signs import Silence
from kv_transfer.control.sizing import pull_bytes_per_token
from kv_transfer.layout import KVLayout
from tandem_pb import node_pb2

logger = logging.getLogger(__name__)

_DEFAULT_INTERVAL_S = 0.25
_MIN_INTERVAL_S = 0.02
_SILENT_AFTER_S = 1.0
_MAX_PREFIXES = 256
"""The number of prefixes that a new watcher gets: the last ones."""
_MAX_PLACES = 16
"""Places of drafts in a step that reports tell of."""
_VERSION = installed_version()
_HOST = host_name()


ResetPrefixCache = Callable[[float], Awaitable[bool]]
"""Returns False when running requests hold blocks, also after these seconds."""


class WatchedEngine(MeasuredEngine, Protocol):
    """The part of `AsyncLLM` that is needed here."""

    @property
    def dead_reason(self) -> str: ...
    @property
    def silence(self) -> Silence: ...
    @property
    def crash_report(self) -> str: ...
    def give_up(self, reason: str) -> None: ...
    @property
    def history(self) -> StepHistory: ...
    async def reset_prefix_cache(self) -> bool: ...
    @property
    def profiles(self) -> ProfiledEngine: ...


@dataclass(slots=True)
class NodeWork:
    """State that the node server knows before its engine does. Changed by its owner alone.

    Attributes:
        draining: The node stops, or changes its role: it takes no new requests.
        drained: An operator wants no new requests here. Routers send none; one that comes all the
            same is answered, and peers still fetch KV.
        num_queued: Requests that the engine does not have yet.
        num_computing: Requests that wait for the engine's next step and nothing else. Those that
            wait for KV from elsewhere do not count.
    """

    draining: bool = False
    drained: bool = False
    num_queued: int = 0
    num_computing: int = 0


class NodeStatus:
    """Reports load and health of one engine. `describe` numbers its reports."""

    def __init__(
        self,
        engine: WatchedEngine,
        role: node_pb2.NodeRole,
        stuck_after_s: float,
        frozen_after_s: float = 3.0,
        switch: RoleSwitch | None = None,
    ) -> None:
        """Begins. `switch` takes the request for another role; None: this node has one role."""
        self.work = NodeWork()
        self.switch = switch or RoleSwitch(role)
        self.reset_prefix_cache: ResetPrefixCache = lambda within_s: engine.reset_prefix_cache()
        """Forgets cached prefixes, here and wherever the node's owner remembers them."""
        self.abort_answers: EndAnswers = lambda names: 0
        """Ends the answers of these names, or all that the node gives; returns how many."""
        self.abort_calls = AbortCalls()
        self.profiles = engine.profiles
        self.adapters = engine.adapters
        self.serves_prefixes = False
        self.kv_paths: Callable[[], Iterable[node_pb2.KVPath]] = tuple
        """Tells of the paths of KV to this node."""
        self.own_fault: Callable[[], str] = str
        """Tells why others refuse this node, though it works; empty if they do not."""
        self._engine = engine
        self._config = engine.config
        """Belongs to this life of the node: its engine may be another's while this one ends."""
        self._role = role
        self._stuck_after_s = stuck_after_s
        self._frozen_after_s = frozen_after_s
        self._sequence = 0
        self._busy_since = time.monotonic()
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()
        self._prefixes: deque[int] = deque(maxlen=_MAX_PREFIXES)
        self._num_prefixes = 0

    def note_prefix(self, prefix_hash: int) -> None:
        """Notes that a prompt was computed that routers know by this hash; 0 stands for none."""
        if prefix_hash:
            self._prefixes.append(prefix_hash)
            self._num_prefixes += 1

    def prefixes_since(self, num_seen: int) -> tuple[list[int], int]:
        """Returns the prefixes noted after the first `num_seen`, and how many there are now. Of
        many, it gives the last."""
        num_new = min(self._num_prefixes - num_seen, len(self._prefixes))
        new = list(self._prefixes)[len(self._prefixes) - num_new :]
        return new, self._num_prefixes

    def notify(self, *, is_urgent: bool = False) -> None:
        """Wakes watchers: something changed that they should learn of before the next interval.
        What is urgent, those learn at once, too, who want few reports of changes."""
        self._changed.set()
        self._changed = asyncio.Event()
        if is_urgent:
            self._urgent.set()
            self._urgent = asyncio.Event()

    @property
    def next_change(self) -> asyncio.Event:
        """Returns what the next change sets."""
        return self._changed

    @property
    def next_urgent_change(self) -> asyncio.Event:
        """Returns what the next change that is urgent sets."""
        return self._urgent

    async def wait_change(self, timeout_s: float, change: asyncio.Event | None = None) -> None:
        """Returns after `change`, the next one if it is not given, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await (change or self._changed).wait()
        except TimeoutError:
            return

    @cached_property
    def _lasting(self) -> node_pb2.NodeLoad:
        """The part of all reports of this life. A report goes with each event of each prompt, and
        working the layout out anew took longer than all else that a first token waits for here.

        `block_size` is the tokens a block holds on average, when every group of layers takes blocks
        from the pool.
        """
        config, num_blocks = self._config, self._engine.ready.num_blocks
        layout, step_tokens = config.kv_layout, config.scheduler.max_num_batched_tokens
        room = tokens_that_fit(layout.groups, num_blocks, step_tokens)
        return node_pb2.NodeLoad(
            node_id=config.engine_id,
            role=self._role,
            epoch=config.epoch,
            block_size=max(1, room // max(1, num_blocks)),
            model_name=config.model.served_model_name,
            model_aliases=config.model.served_aliases,
            fingerprint=fingerprint(layout),
            max_model_len=config.model.max_model_len,
            version=_VERSION,
            host_name=_HOST,
            kv_bytes_per_token=pull_bytes_per_token(layout),
        )

    def load(self) -> node_pb2.NodeLoad:
        """Returns a report without adapters: there may be thousands. Newer ones have greater
        `sequence`."""
        self._sequence += 1
        stats, work = self._engine.stats, self.work
        total = stats.num_total_blocks or self._engine.ready.num_blocks
        load = node_pb2.NodeLoad(
            sequence=self._sequence,
            draining=work.draining or work.drained,
            drained=work.drained and not work.draining,
            num_waiting_requests=stats.num_waiting + work.num_queued,
            num_running_requests=stats.num_running,
            num_waiting_tokens=stats.num_waiting_tokens,
            num_idle_requests=stats.num_idle_class,
            num_free_blocks=stats.num_free_blocks if stats.num_total_blocks else total,
            num_total_blocks=total,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            slack_tokens_per_s=stats.slack_tokens_per_s,
            seconds_since_progress=self.seconds_since_progress(),
            num_transfers=stats.num_waiting_for_remote_kvs + stats.num_delayed_frees,
            serves_prefixes=self.serves_prefixes,
            http_port=self.switch.http_port,
            has_same_adapters=True,
            prompt_tokens_computed=stats.prompt_tokens_computed,
            prompt_tokens_cached=stats.prompt_tokens_cached,
            prompt_tokens_from_host=stats.prompt_tokens_from_host,
            prompt_tokens_from_disk=stats.prompt_tokens_from_disk,
            prompt_tokens_transferred=stats.prompt_tokens_transferred,
            generation_tokens=stats.generation_tokens,
            num_preemptions=stats.num_preemptions,
            num_receiving=stats.num_waiting_for_remote_kvs,
            num_held=stats.num_delayed_frees,
            num_drafts=stats.drafts.num_drafts,
            num_accepted_per_pos=stats.drafts.num_accepted_per_pos[:_MAX_PLACES],
            kv_paths=self.kv_paths(),
            groups=[
                node_pb2.GroupLoad(
                    num_waiting_requests=one.num_waiting,
                    num_running_requests=one.num_running,
                    num_waiting_tokens=one.num_waiting_tokens,
                    num_free_blocks=one.num_free_blocks,
                )
                for one in stats.groups
            ],
        )
        load.MergeFrom(self._lasting)
        return load

    def set_drained(self, is_drained: bool) -> bool:
        """Takes the node out of use, or back. Returns whether that changes anything."""
        if self.work.drained is is_drained:
            return False
        self.work.drained = is_drained
        logger.info("drained by call" if is_drained else "in use again, by call")
        self.notify(is_urgent=True)
        return True

    def identity(self) -> node_pb2.SwitchRoleAnswer:
        """Returns who this node is in this life."""
        config = self._config
        return node_pb2.SwitchRoleAnswer(node_id=config.engine_id, epoch=config.epoch)

    def seconds_since_progress(self) -> float:
        """Seconds since the engine made progress; 0 while there is nothing to compute."""
        now = time.monotonic()
        stats = self._engine.stats
        if stats.num_running == 0 and self.work.num_computing == 0:
            self._busy_since = now
        return now - max(stats.last_step_at, self._busy_since)

    @property
    def is_silent(self) -> bool:
        """Returns whether a process of the engine gives no sign of life: then neither do we."""
        return self._engine.silence.seconds > _SILENT_AFTER_S

    @property
    def is_frozen(self) -> bool:
        """Returns whether the engine has been silent for so long that nothing should wait for
        it."""
        return self._engine.silence.seconds > self._frozen_after_s

    @property
    def crash_report(self) -> str:
        """Returns the path of the report on the engine's death, for operators; empty: none."""
        return self._engine.crash_report

    @property
    def history(self) -> StepHistory:
        """Tells of the engine's last steps."""
        return self._engine.history

    def fault(self) -> str:
        """Returns why this node cannot serve; empty while it can."""
        if self._engine.is_dead:
            return f"the engine has died: {self._engine.dead_reason}"
        stuck_s = self.seconds_since_progress()
        if stuck_s > self._stuck_after_s:
            return f"the engine has work but made no step for {stuck_s:.0f} s"
        silence = self._engine.silence
        if silence.seconds > self._frozen_after_s:
            return f"{silence.name} has given no sign of life for {silence.seconds:.0f} s"
        return ""

    def give_up_if_stuck(self) -> None:
        """Gives up an engine that is stuck: what it should have answered fails now, and can be
        tried elsewhere; the node ends as with a dead one."""
        longest_s = max(self.seconds_since_progress(), self._engine.silence.seconds)
        if not self._engine.is_dead and longest_s > self._stuck_after_s:
            self._engine.give_up(self.fault())


class NodeStatusServicer(RoleServicer):
    """Serves `Watch`, and what routers and operators ask."""

    def __init__(self, status: NodeStatus) -> None:
        super().__init__(status.profiles, status.adapters, status.switch, status.identity())
        self._status = status

    async def ResetPrefixCache(
        self,
        request: node_pb2.ResetPrefixCacheRequest,
        context: grpc.aio.ServicerContext[
            node_pb2.ResetPrefixCacheRequest, node_pb2.ResetPrefixCacheAnswer
        ],
    ) -> node_pb2.ResetPrefixCacheAnswer:
        try:
            is_reset = await self._status.reset_prefix_cache(request.within_s)
        except (EngineCallTimeout, EngineDeadError) as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return node_pb2.ResetPrefixCacheAnswer(is_reset=is_reset)

    async def AbortAnswers(
        self,
        request: node_pb2.AbortAnswersRequest,
        context: grpc.aio.ServicerContext[
            node_pb2.AbortAnswersRequest, node_pb2.AbortAnswersAnswer
        ],
    ) -> node_pb2.AbortAnswersAnswer:
        names = None if request.all else frozenset(request.names)
        end = self._status.abort_answers
        if not request.call:
            return node_pb2.AbortAnswersAnswer(num_aborted=end(names))
        num_aborted = self._status.abort_calls.end(request.call, names, end)
        self._status.notify(is_urgent=True)
        return node_pb2.AbortAnswersAnswer(num_aborted=num_aborted)

    async def SetDrained(
        self,
        request: node_pb2.SetDrainedRequest,
        context: grpc.aio.ServicerContext[node_pb2.SetDrainedRequest, node_pb2.SetDrainedAnswer],
    ) -> node_pb2.SetDrainedAnswer:
        if self._status.work.draining:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "this node stops, or changes its role"
            )
        changed = self._status.set_drained(request.drained)
        load = self._status.load()
        add_adapters(load, self._status.adapters.known)
        return node_pb2.SetDrainedAnswer(load=load, changed=changed)

    async def Watch(
        self,
        request: node_pb2.WatchRequest,
        context: grpc.aio.ServicerContext[node_pb2.WatchRequest, node_pb2.NodeLoad],
    ) -> AsyncIterator[node_pb2.NodeLoad]:
        interval_s = request.interval_s if request.interval_s > 0 else _DEFAULT_INTERVAL_S
        interval_s = max(interval_s, _MIN_INTERVAL_S)
        rest_s = min(max(request.change_interval_s, _MIN_INTERVAL_S), interval_s) - _MIN_INTERVAL_S
        num_seen = num_sent = num_aborts = 0
        adapters = AdapterReports(self._status.adapters.known, request)
        while True:
            change, urgent = self._status.next_change, self._status.next_urgent_change
            if not self._status.is_silent:
                load = self._status.load()
                adapters.add_to(load)
                prefixes, num_seen = self._status.prefixes_since(num_seen)
                load.recent_prefixes.extend(prefixes)
                calls, num_sent = self._status.adapters.records.since(num_sent)
                load.adapter_calls.extend(map(adapter_call, calls))
                aborts, num_aborts = self._status.abort_calls.since(num_aborts)
                load.abort_calls.extend(aborts)
                yield load
            await asyncio.sleep(_MIN_INTERVAL_S)
            if rest_s > 0:
                await self._status.wait_change(rest_s, urgent)
            await self._status.wait_change(interval_s - _MIN_INTERVAL_S - rest_s, change)


def fingerprint(layout: KVLayout) -> str:
    """Returns a text that is equal for nodes whose KV fits together; block size and TP size may
    differ."""
    formats = {f"{group.dtype}:{group.scales}".rstrip(":") for group in layout.groups}
    dtypes = "+".join(sorted(formats))
    return f"{layout.protocol_version}-{dtypes}-{layout.model_hash}"
