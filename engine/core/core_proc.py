"""The engine core's process: `python -m edge.program engine.core.core_proc`.

    1. reads its configuration, connects to the node server
    2. starts workers and connector ──▶ LoadProgress, then EngineReady
    3. sleeps until something is readable: a message of the node server, a step's result, a
       transfer event, the end of a child, SIGTERM. Then one `EngineCore.step`. Each turn is a
       sign of life for the node server; none takes long, as steps are computed elsewhere
    4. ShutdownEngine or SIGTERM: ends its children, exit code 0
       anything wrong: EngineDead with the reason first, exit code 1

While starting, SIGTERM simply ends this process, and the kernel its children.
"""

from __future__ import annotations

import gc
import logging
import sys
import time

import msgspec
import zmq

from edge.http.event_loop.kernel_timer import KernelTimer
from edge.logs.setup import setup_logging
from edge.program import settle
from engine.contracts.errors import EngineDeadError
from engine.contracts.messages import (
    AddAdapter,
    DescribeEngine,
    EngineCoreOutputs,
    EngineDead,
    EngineDescription,
    EngineReady,
    FromEngineCore,
    LoadProgress,
    OfferPrefix,
    PeerChanged,
    PrefixCacheReset,
    PrefixOffered,
    RemoveAdapter,
    ResetPrefixCache,
    RoleSwitched,
    ShutdownEngine,
    StartProfile,
    StopProfile,
    SwitchRole,
    ToEngineCore,
)
from engine.contracts.outputs import SchedulerStats
from engine.contracts.reports.crash_facts import EngineFacts, chain_of
from engine.contracts.steps.step_log import StepLog
from engine.core.core import EngineCore
from engine.core.core_config import CoreProcConfig
from engine.core.profile_session import ProfileSession
from engine.core.role_session import RoleSession
from engine.executor.abstract import Executor, PollSource
from engine.executor.factory import create_executor
from engine.heartbeat_slots import CORE_PLACE
from host.child_process import read_config
from host.life_signs import SIGN_INTERVAL_S, LifeSigns, LifeThread
from host.pause_log import PauseKind, PauseLog
from host.sockets.local_socket import Context, connect_socket
from host.sockets.message_reader import MessageReader
from host.termination import termination_fd
from kv_transfer.metadata import KVPeer

_STATS_INTERVAL_S = 0.1
"""While busy. An engine that becomes idle reports at once."""
_REPORT_TIMEOUT_S = 5.0
_LONG_TURN_S = 0.002

logger = logging.getLogger(__name__)


class EngineCoreProc:
    """The loop around an `EngineCore`."""

    _executor: Executor
    _profiles: ProfileSession
    _roles: RoleSession

    def __init__(self, config: CoreProcConfig) -> None:
        self._config = config.engine
        self._signs: LifeSigns | None = None
        if config.life_signs is not None:
            self._signs = LifeSigns.attach(config.life_signs)
        self._step_log = StepLog.attach(config.step_log) if config.step_log is not None else None
        self._pauses = PauseLog.attach(config.pauses) if config.pauses is not None else None
        if self._pauses is not None:
            self._pauses.watch_garbage()
        self._context = Context()
        self._client = connect_socket(self._context, zmq.PAIR, config.client_address)
        self._encoder = msgspec.msgpack.Encoder()
        self._messages: MessageReader[ToEngineCore] = MessageReader(
            self._client, ToEngineCore, "the node server"
        )
        self._core: EngineCore | None = None
        self._stats = SchedulerStats()
        self._stats_sent_at = 0.0
        self._poller = zmq.Poller()
        self._step_timer = KernelTimer()
        """Ends the wait for sockets when a step that is held back is due."""
        self._step_timer_at: float | None = None
        self._connector_checked_at = 0.0
        self._peer: KVPeer | None = None
        """The peer as the node server knows it."""

    def run(self) -> int:
        """Runs the engine until its end and returns the exit code."""
        executor: Executor | None = None
        try:
            executor = self._executor = create_executor(self._config, self._context, self._signs)
            core = self._core = EngineCore(
                self._config, executor, self._report, self._signs, self._step_log
            )
            self._profiles = ProfileSession(self._config, executor, self._send)
            self._roles = RoleSession(core)
            self._serve(core)
        except EngineDeadError as error:
            return self._die(str(error), error)
        except Exception as error:
            logger.exception("the engine core failed")
            return self._die(f"the engine core failed: {type(error).__name__}: {error}", error)
        finally:
            if self._core is not None:
                self._core.shutdown()
            if executor is not None:
                executor.shutdown()
            self._context.destroy()
        return 0

    def _die(self, reason: str, error: Exception) -> int:
        logger.error("engine %s is dead: %s", self._config.engine_id, reason)
        facts = self._facts(error)
        self._send(EngineDead(reason, facts))
        if facts is not None:
            self._wait_for_report()
        return 1

    def _facts(self, error: Exception) -> EngineFacts | None:
        """Returns what a report says of this engine; None when nothing wants one, or nothing is
        known: then the reason alone must do."""
        if self._step_log is None or self._core is None:
            return None
        try:
            facts = self._core.facts()
        except Exception:
            logger.exception("the dead engine cannot be described")
            facts = EngineFacts()
        facts.exceptions = {"the engine core": chain_of(error)}
        if isinstance(error, EngineDeadError):
            facts.exceptions |= error.exceptions
        return facts

    def _wait_for_report(self) -> None:
        """Waits until the node server lets us go: it takes our stacks and those of the workers."""
        deadline = time.monotonic() + _REPORT_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            if self._client.poll(int(left * 1000) + 1):
                message = self._messages.next()
                if isinstance(message, ShutdownEngine):
                    return

    def _serve(self, core: EngineCore) -> None:
        """Returns when asked to stop."""
        termination = termination_fd()
        for source in self._poll_sources(core, termination):
            self._poller.register(source, zmq.POLLIN)
        settle()
        self._send(self._ready(core))
        while True:
            if self._signs is not None:
                self._signs.give(CORE_PLACE)
            self._set_step_timer(core.next_step_at)
            ready = dict(self._poller.poll(self._timeout_ms(core)))
            woken_at = time.monotonic()
            if self._step_timer.fileno() in ready:
                self._step_timer.read()
            if termination in ready:
                return
            if self._client in ready and not self._handle_messages(core):
                return
            self._check_connector(core)
            self._send_results(core, core.step())
            self._profiles.check()
            self._check_role(core)
            self._note_turn(woken_at)

    def _note_turn(self, woken_at: float) -> None:
        """Notes a turn that took long: what workers need next waited for its end."""
        now = time.monotonic()
        if self._pauses is not None and now - woken_at >= _LONG_TURN_S:
            self._pauses.add(PauseKind.TURN, now, now - woken_at)

    def _poll_sources(self, core: EngineCore, termination: int) -> list[PollSource]:
        executor = self._executor.poll_sources
        own = self._client, self._step_timer.fileno()
        return [*own, *executor, core.connector.fileno(), termination]

    def _ready(self, core: EngineCore) -> EngineReady:
        self._peer = core.connector.peer_info
        return EngineReady(
            num_blocks=core.num_blocks,
            device_name=core.device_name,
            peer=self._peer,
            worker_pids=self._executor.worker_pids,
            transfer_pids=core.connector.process_pids,
            model_hash=core.config.model.model_hash,
        )

    def _check_role(self, core: EngineCore) -> None:
        """Goes on with a change of roles. Signs of life come from another thread meanwhile, as
        transfer processes take a second or two to start."""
        if not self._roles.is_due():
            return
        connector, signs = core.connector.fileno(), self._signs
        thread = LifeThread(lambda: signs.give(CORE_PLACE)) if signs is not None else None
        try:
            call_id = self._roles.switch()
        finally:
            if thread is not None:
                thread.close()
        self._poller.unregister(connector)
        self._poller.register(core.connector.fileno(), zmq.POLLIN)
        self._config, self._stats = core.config, SchedulerStats()
        self._send(RoleSwitched(call_id, self._ready(core)))

    def _set_step_timer(self, at: float | None) -> None:
        """Sets it to CLOCK_MONOTONIC seconds; None: no step is held back."""
        if at == self._step_timer_at:
            return
        self._step_timer_at = at
        if at is None:
            self._step_timer.stop()
        else:
            self._step_timer.set(at)

    def _timeout_ms(self, core: EngineCore) -> int:
        """Milliseconds until something must be looked at without being asked, but for a step that
        is held back."""
        now = time.monotonic()
        until = min(
            now + SIGN_INTERVAL_S,
            self._connector_checked_at + core.connector.check_interval_s,
            self._profiles.deadline,
            self._roles.deadline,
        )
        if self._executor.deadline is not None:
            until = min(until, self._executor.deadline)
        return max(0, int((until - now) * 1000) + 1)

    def _check_connector(self, core: EngineCore) -> None:
        now = time.monotonic()
        if now < self._connector_checked_at + core.connector.check_interval_s:
            return
        self._connector_checked_at = now
        core.connector.check_alive()
        peer = core.connector.peer_info
        if peer is not None and peer != self._peer:
            self._send(PeerChanged(peer=peer))
        self._peer = peer

    def _handle_messages(self, core: EngineCore) -> bool:
        """Handles all that have arrived. Whether to go on."""
        while (message := self._messages.next()) is not None:
            if not self._handle(core, message):
                return False
        return True

    def _handle(self, core: EngineCore, message: ToEngineCore) -> bool:
        match message:
            case ShutdownEngine():
                return False
            case ResetPrefixCache(call_id):
                self._send(PrefixCacheReset(call_id, core.scheduler.reset_prefix_cache()))
            case OfferPrefix(call_id, chains):
                group, transfer_id, num_tokens = core.scheduler.remote.offer(chains)
                self._send(PrefixOffered(call_id, transfer_id, num_tokens, group))
            case DescribeEngine():
                self._send(EngineDescription(core.facts()))
            case StartProfile(call_id, options):
                self._profiles.start(call_id, options)
            case StopProfile(call_id):
                self._profiles.stop(call_id)
            case AddAdapter(call_id, digest, path):
                core.adapters.ledger.add(call_id, digest, path)
            case RemoveAdapter(call_id, digest):
                core.adapters.ledger.remove(call_id, digest)
            case SwitchRole():
                if (refusal := self._roles.ask(message)) is not None:
                    self._send(refusal)
            case _:
                core.handle(message)
        return True

    def _send_results(self, core: EngineCore, results: EngineCoreOutputs) -> None:
        now = results.timestamp
        for answer in core.adapters.ledger.take_answers():
            self._send(answer)
        if core.is_idle or now >= self._stats_sent_at + _STATS_INTERVAL_S:
            stats = core.stats()
            stats.num_dropped_messages += self._messages.num_dropped
            if stats != self._stats:
                self._stats, self._stats_sent_at = stats, now
                results.stats = stats
        has_news = results.outputs or results.kv_results or results.prefix_asks
        if has_news or results.stats is not None:
            self._send(results)
        if core.is_idle and logger.isEnabledFor(logging.DEBUG):
            core.check_empty()

    def _report(self, stage: str, fraction: float, total_bytes: int = 0) -> None:
        self._send(LoadProgress(stage, fraction, total_bytes))

    def _send(self, message: FromEngineCore) -> None:
        self._client.send(self._encoder.encode(message))


def main() -> None:
    config = read_config(CoreProcConfig)
    setup_logging(config.log, f"engine core of {config.engine.engine_id}", is_child=True)
    # What was imported stays: a full collection that looks at it holds a step up by 50 ms and more.
    gc.freeze()
    sys.exit(EngineCoreProc(config).run())


if __name__ == "__main__":
    main()
