"""The node server's end of the engine core process.

1. `EngineCoreClient(...)` binds a socket and starts the process
2. messages arrive through `on_message`, in the event loop, progress first
3. the process ends, or says that it will: `on_dead`, once, with the reason
4. `shutdown`
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
import zmq

from edge.logs.setup import log_style
from engine.config import EngineConfig
from engine.contracts.messages import (
    DescribeEngine,
    EngineDead,
    EngineDescription,
    EngineReady,
    FromEngineCore,
    ShutdownEngine,
    ToEngineCore,
)
from engine.contracts.reports.crash_facts import EngineFacts
from engine.core.core_config import CORE_MODULE, CoreProcConfig
from engine.frontend.crash_reporter import CrashReporter
from engine.frontend.step_history import StepHistory
from engine.heartbeat_slots import CORE_PLACE, names_of_step_makers, num_places
from host.child_process import ChildProcess, ipc_address
from host.life_signs import LifeSigns, LifeWatch
from host.sockets.local_socket import Context, bind_socket
from host.sockets.message_reader import MessageReader

_FINAL_WAIT_S = 0.3
"""Seconds to wait for final messages: a process that has ended may have said why, and the message
may still be on its way."""
_FINAL_LOOKS = 6
_SHUTDOWN_TIMEOUT_S = 15.0


class EngineCoreClient:
    """Starts the engine core and talks to it. Must be made inside the event loop that it serves."""

    def __init__(
        self,
        config: EngineConfig,
        on_message: Callable[[FromEngineCore], None],
        on_dead: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_dead = on_dead
        self._encoder = msgspec.msgpack.Encoder()
        self._ended = asyncio.Event()
        self._is_dead = False
        self._context = Context()
        # An engine that nothing shut down must not hold up garbage collection.
        self._context.setsockopt(zmq.LINGER, 0)
        address = ipc_address(config.engine_id, f"{config.epoch:x}-core")
        # A pair has one other end: nothing else gets messages that are meant for the engine core.
        self._socket = bind_socket(self._context, zmq.PAIR, address)
        self._messages: MessageReader[FromEngineCore] = MessageReader(
            self._socket, FromEngineCore, "the engine core"
        )
        signs = LifeSigns.create(f"tandem-{config.engine_id}-life", num_places(config))
        self.history = StepHistory(config.engine_id)
        """The last steps, and what held the engine core and this process up."""
        self._child = ChildProcess.start(
            CORE_MODULE,
            CoreProcConfig(
                engine=config,
                client_address=address,
                log=log_style(),
                life_signs=signs.handle(CORE_PLACE),
                step_log=self.history.steps.handle,
                pauses=self.history.core_pauses.handle,
            ),
            "the engine core",
        )
        self.pid = self._child.pid
        self.crash: CrashReporter | None = None
        """Reports on the engine's death, if anything wants that."""
        if (folder := config.inspection.crash_report_dir) is not None:
            self.crash = CrashReporter(
                config,
                folder,
                self.pid,
                self.history.steps,
                partial(self.send, DescribeEngine()),
                self._release_core,
            )
        self._was_ready = False
        self.life = LifeWatch(signs, names_of_step_makers(config))
        """Watches the processes without which no step ends."""
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._loop.add_reader(self._child.sentinel, self._on_end)

    def send(self, message: ToEngineCore) -> None:
        """Sends a message and returns at once. A dead engine receives nothing, nor one that died a
        moment ago, whose end is not known here yet."""
        if self._is_dead:
            return
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return
        if self._socket.poll(0):
            # Sending has taken the edge that would have announced this message.
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        """Takes all there is: ZeroMQ's descriptor announces changes, not messages."""
        while not self._socket.closed:
            message = self._messages.next()
            if message is None:
                return
            if isinstance(message, EngineDead):
                self._die(message.reason, message.facts)
            elif isinstance(message, EngineDescription):
                if self.crash is not None:
                    self.crash.on_description(message.facts)
            else:
                self._was_ready |= isinstance(message, EngineReady)
                self._on_message(message)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._child.sentinel)
        self._ended.set()
        self._drain_final_messages(_FINAL_LOOKS)

    def _drain_final_messages(self, num_looks: int) -> None:
        """Waits for them in short sleeps: a stall of this process costs at most one of them."""
        self._receive()
        if num_looks > 0:
            pause_s = _FINAL_WAIT_S / _FINAL_LOOKS
            self._loop.call_later(pause_s, self._drain_final_messages, num_looks - 1)
        else:
            self._die(self._child.describe_exit())

    def _die(self, reason: str, facts: EngineFacts | None = None) -> None:
        if not self._is_dead:
            self._is_dead = True
            self._report(reason, facts, is_alive=False)
            self._on_dead(reason)

    def given_up(self, reason: str) -> None:
        """Reports on an engine that hangs and is as good as dead."""
        self._report(reason, None, is_alive=not self._is_dead)

    def _report(self, reason: str, facts: EngineFacts | None, *, is_alive: bool) -> None:
        """Begins a report, unless the engine never started: then the reason says it all. A core
        that has sent its facts waits for the report: it is released where none begins."""
        if self.crash is not None and self._was_ready:
            self.crash.begin(reason, facts, is_alive=is_alive)
        elif facts is not None:
            self._release_core()

    def _release_core(self) -> None:
        """Lets a dying engine core end, which waits for its report."""
        with suppress(zmq.ZMQError):
            self._socket.send(self._encoder.encode(ShutdownEngine()), zmq.NOBLOCK)

    async def shutdown(self) -> None:
        """Asks the process to end and sees that it does. Idempotent."""
        if self._socket.closed:
            return
        if self.crash is not None:
            await self.crash.finished()
        try:
            self.send(ShutdownEngine())
            async with asyncio.timeout(_SHUTDOWN_TIMEOUT_S):
                await self._ended.wait()
        except TimeoutError:
            await asyncio.to_thread(self._child.stop)
        finally:
            self.close()

    def close(self, grace_s: float = 5.0) -> None:
        """Ends the process without asking; it has `grace_s` to end by itself. Idempotent."""
        if self._socket.closed:
            return
        self._is_dead = True
        self._loop.remove_reader(self._socket.fileno())
        if self._child.sentinel >= 0:
            self._loop.remove_reader(self._child.sentinel)
        self._child.stop(grace_s)
        self.history.close()
        self._socket.close(linger=0)
        self._context.term()
