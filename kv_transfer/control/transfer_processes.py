"""The transfer processes of an engine, as the scheduler half sees them.

    1. `TransferProcesses(...)` starts rank x num_processes children and waits for their reports
    2. `send` never waits: commands to a process that is starting are delivered when it is up
    3. `fileno` is readable when a process has something to say, has died, or after `wake`
    4. `receive` hands out what they said; `reap` kills the frozen, restarts the dead, names both
    5. `shutdown`

A producer's process comes back on its old port, so peers need not learn a new one; meanwhile the
port is kept from others. If it is lost all the same, the process takes another, and peers learn it
by the handshake that follows a failed pull. A process that dies young again and again is restarted
with a pause that doubles each time; in a pause nothing is sent to it. One that gives no sign of
life for `frozen_after_s` counts as frozen: transfers that it holds would wait for it.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec
import zmq

from edge.address import split_address
from edge.logs.setup import log_style
from host.child_process import HostedProcess, stop_all
from host.life_signs import LifeSigns, LifeWatch
from host.process_host import LocalHost, ProcessHost
from host.sockets.local_socket import Context, bind_socket
from host.sockets.message_reader import MessageReader
from host.sockets.secure_socket import listen
from kv_transfer.base import KVCacheHandle
from kv_transfer.config import KVTransferConfig
from kv_transfer.control.control_channel import CommandSender
from kv_transfer.control.other_clocks import on_our_clock
from kv_transfer.control.process_config import TransferProcessConfig, local_events_address
from kv_transfer.control.restart_pauses import RestartPauses
from kv_transfer.errors import KVTransferError
from kv_transfer.layout import KVLayout
from kv_transfer.metadata import (
    ProcessEvent,
    ProcessFault,
    ProcessMessage,
    ProcessReport,
    TransferCommand,
    TransferEvent,
)
from kv_transfer.tier import TierContents

logger = logging.getLogger(__name__)

_KILLED_WHILE_STARTING = 3
_FAULT_TIMEOUT_S = 0.5  # The message that says why may arrive after the end.
_START_TIMEOUT_S = 60.0

_QUIET_GRPC = {"GRPC_VERBOSITY": "NONE"}
"""Otherwise a peer that goes away writes lines to our log; we report it ourselves."""


class TransferProcessFailed(KVTransferError):
    """A transfer process could not be started."""

    retryable = False


class _TransferProcess:
    """One of them, over its restarts."""

    def __init__(self, config: TransferProcessConfig, host: ProcessHost, context: Context) -> None:
        self.config = config
        self.child: HostedProcess | None = None
        self.report: ProcessReport | None = None
        self.past = ProcessReport(config.process)
        """Totals of its former lives."""
        self.fault = ""
        """Why it ended, if it has said so."""
        self.address = ""
        """That it listens on, or will again when it was restarted."""
        self._host = host
        self._context = context
        self._commands: CommandSender | None = None
        self._port_holder: socket.socket | None = None
        self._pauses = RestartPauses()

    @property
    def name(self) -> str:
        return f"transfer process {self.config.index} of rank {self.config.rank}"

    def start(self) -> HostedProcess:
        self._pauses.begin()
        self.child = self._host.start(
            "kv_transfer.control.process", self.config, self.name, env=_QUIET_GRPC
        )
        self._commands = CommandSender(self._context, self.config)
        return self.child

    def send(self, message: bytes) -> bool:
        """Returns False while nothing will answer soon."""
        if self._commands is None or (self.report is None and self.config.start_delay_s > 0):
            return False
        self._commands.send(message)
        return True

    def accept(self, report: ProcessReport) -> None:
        """Late words of a dead predecessor are not about this process."""
        if report.generation == self.config.generation and self._commands is not None:
            self.report = report
            self.address = report.address
            self._let_port_go()
            self._commands.accept(report)

    def note_fault(self, fault: ProcessFault) -> None:
        """Notes why it ends."""
        if fault.generation == self.config.generation:
            self.fault = fault.reason

    def describe_exit(self, child: HostedProcess) -> str:
        """Says how its child ended, and why, if it has said so."""
        return child.describe_exit() + (f" ({self.fault})" if self.fault else "")

    def restart(self) -> HostedProcess:
        """Starts it again after its death. Commands that it has not read are dropped."""
        if self.child is not None:
            self.child.stop()
        self.close()
        self._remember()
        if self.address and self.config.link is None:
            self._port_holder = _hold_port(self.address)
        return self.start()

    def close(self) -> None:
        self._let_port_go()
        if self._commands is not None:
            self._commands.close()
            self._commands = None

    def _let_port_go(self) -> None:
        if self._port_holder is not None:
            self._port_holder.close()
            self._port_holder = None

    def _remember(self) -> None:
        port = self.config.port
        if self.report is not None:
            port = int(self.report.address.rpartition(":")[2] or 0)
            self.past = _add_totals(self.past, self.report)
        self.report = None
        self.fault = ""
        self.config = msgspec.structs.replace(
            self.config,
            generation=self.config.generation + 1,
            port=port,
            start_delay_s=self._pauses.next_s(),
        )


def _hold_port(address: str) -> socket.socket | None:
    """Returns a socket bound to it and deaf, so that no connection of this host leaves from it; who
    listens there can share it. None: another process was quicker, or it is a name."""
    host, port = split_address(address)
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        holder = socket.socket(infos[0][0], socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(infos[0][4])
    except OSError:
        holder.close()
        return None
    return holder


def _add_totals(past: ProcessReport, last: ProcessReport) -> ProcessReport:
    return msgspec.structs.replace(
        past,
        bytes_moved=past.bytes_moved + last.bytes_moved,
        corrupt_chunks=past.corrupt_chunks + last.corrupt_chunks,
        leases_expired=past.leases_expired + last.leases_expired,
        dropped_messages=past.dropped_messages + last.dropped_messages,
        plaintext_connections=past.plaintext_connections + last.plaintext_connections,
        reclaimed=dict(Counter(past.reclaimed) + Counter(last.reclaimed)),
        received=dict(Counter(past.received) + Counter(last.received)),
    )


class TransferProcesses:
    """All of one engine. Used by one thread, which must outlive them."""

    def __init__(
        self,
        config: KVTransferConfig,
        engine_id: str,
        epoch: int,
        layout: KVLayout,
        handles: list[KVCacheHandle],
        hosts: Sequence[ProcessHost] = (),
        signs: LifeSigns | None = None,
    ) -> None:
        """`handles` and `hosts` by rank; no hosts: all on this one. `signs`: one place for each
        process; None: none is watched."""
        self.num_restarts = 0
        self._signs = signs
        self._frozen_after_s = config.frozen_after_s
        self._encoder = msgspec.msgpack.Encoder()
        self._context = Context()
        self._poller = select.epoll()
        self._num_per_rank = config.num_processes
        self._remote_events_address = ""
        address = local_events_address(engine_id)
        self._events = bind_socket(self._context, zmq.SocketType.PULL, address)
        self._messages: MessageReader[ProcessMessage] = MessageReader(
            self._events, ProcessMessage, "a transfer process"
        )
        configs = [
            TransferProcessConfig(
                transfer=config,
                engine_id=engine_id,
                epoch=epoch,
                layout=layout,
                handle=handle,
                index=index,
                log=log_style(),
            )
            for handle in handles
            for index in range(config.num_processes)
        ]
        hosts = hosts or [LocalHost()] * len(handles)
        self._processes = [
            _TransferProcess(self._on_host(own, hosts[own.rank]), hosts[own.rank], self._context)
            for own in configs
        ]
        self._life: LifeWatch | None = None
        if signs is not None:
            names = {process.config.process: process.name for process in self._processes}
            self._life = LifeWatch(signs, names)
        self._poller.register(self._events.fileno(), select.EPOLLIN)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wakeup, select.EPOLLIN)
        self._early: list[ProcessEvent] = []
        try:
            for process in self._processes:
                self._poller.register(process.start().sentinel, select.EPOLLIN)
            self._wait_until_ready()
        except BaseException:
            self.shutdown()
            raise

    def _on_host(self, config: TransferProcessConfig, host: ProcessHost) -> TransferProcessConfig:
        """Returns the configuration of a process on `host`."""
        link = host.link
        if link is None:
            if self._signs is None:
                return config
            return msgspec.structs.replace(config, life_sign=self._signs.handle(config.process))
        if not self._remote_events_address:
            self._remote_events_address = listen(self._events, link.core_address, link.key)
        named = config.transfer.named_hosts or (link.host_address,)
        return msgspec.structs.replace(
            config,
            transfer=replace(config.transfer, hosts=named, advertised_hosts=()),
            link=link,
            remote_events_address=self._remote_events_address,
        )

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def endpoints(self) -> tuple[tuple[str, ...], ...]:
        """Returns addresses by rank. A process that is being restarted keeps its address."""
        addresses = [process.address for process in self._processes]
        step = self._num_per_rank
        return tuple(tuple(addresses[i : i + step]) for i in range(0, len(addresses), step))

    @property
    def pids(self) -> list[int]:
        return [process.child.pid for process in self._processes if process.child is not None]

    @property
    def num_ready(self) -> int:
        return sum(process.report is not None for process in self._processes)

    def fileno(self) -> int:
        return self._poller.fileno()

    def wake(self) -> None:
        """Makes `fileno` readable until the next `receive`."""
        os.eventfd_write(self._wakeup, 1)

    def send(self, process: int, command: TransferCommand) -> bool:
        """Returns False when the process is down: nothing will answer."""
        return self._processes[process].send(self._encoder.encode(command))

    def receive(self) -> list[ProcessEvent]:
        """Returns what arrived since the last call, in order."""
        events, self._early = self._early, []
        with suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        while (message := self._messages.next()) is not None:
            if not 0 <= message.process < len(self._processes):
                self._messages.drop(0)
            elif isinstance(message, ProcessReport):
                self._accept(message)
            elif isinstance(message, ProcessFault):
                self._processes[message.process].note_fault(message)
            elif isinstance(message, TransferEvent):
                events.append(on_our_clock(message))
            elif not isinstance(message, TierContents) or self._is_alive(message):
                events.append(message)
        return events

    def _is_alive(self, contents: TierContents) -> bool:
        return contents.generation == self._processes[contents.process].config.generation

    def _accept(self, report: ProcessReport) -> None:
        process = self._processes[report.process]
        process.accept(report)
        if self._signs is not None and process.config.link is not None:
            self._signs.give(report.process)

    def reap(self) -> dict[int, str]:
        """Processes found dead or frozen since the last call: how they ended. They are started
        again."""
        frozen = self._frozen()
        dead: dict[int, str] = {}
        for number, process in enumerate(self._processes):
            child = process.child
            if child is not None and (number in frozen or child.exit_code is not None):
                dead[number] = frozen.get(number) or process.describe_exit(child)
                logger.error("%s and is started again", dead[number])
                self._start_again(number, process, child)
        return dead

    def _start_again(self, number: int, process: _TransferProcess, child: HostedProcess) -> None:
        self._poller.unregister(child.sentinel)
        child.reap(0.0)
        if self._signs is not None:
            self._signs.forget(number)
        self._poller.register(process.restart().sentinel, select.EPOLLIN)
        self.num_restarts += 1

    def _frozen(self) -> dict[int, str]:
        silences = self._life.silences() if self._life is not None else {}
        return {
            number: f"{silence.name} gave no sign of life for {silence.seconds:.1f} s"
            for number, silence in silences.items()
            if silence.seconds > self._frozen_after_s
        }

    @property
    def num_dropped_messages(self) -> float:
        """Counts those on our own socket, and on those of the transfer processes."""
        return self._messages.num_dropped + self.total("dropped_messages")

    def total(self, field: str) -> float:
        """Returns the sum of one field of `ProcessReport` over all processes and their former
        lives."""
        reports = [process.report for process in self._processes if process.report is not None]
        reports += [process.past for process in self._processes]
        return float(sum(getattr(report, field) for report in reports))

    def totals(self, field: str) -> Counter[str]:
        """Returns the sums, by name, of a field of `ProcessReport` that has names."""
        reports = [process.report for process in self._processes if process.report is not None]
        reports += [process.past for process in self._processes]
        found: Counter[str] = Counter()
        for report in reports:
            found.update(getattr(report, field))
        return found

    def shutdown(self) -> None:
        """Ends them. Idempotent."""
        if self._poller.closed:
            return
        stop_all([process.child for process in self._processes if process.child is not None])
        for process in self._processes:
            process.close()
        self._poller.close()
        os.close(self._wakeup)
        self._events.close(linger=0)
        self._context.term()

    def _wait_until_ready(self) -> None:
        """A process that is killed meanwhile is started again, a few times; one that ends by
        itself would do so again."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while waiting := [one for one in enumerate(self._processes) if one[1].report is None]:
            for number, process in waiting:
                child = process.child
                if child is None or child.exit_code is None:
                    continue
                if child.exit_code > 0 or self.num_restarts >= _KILLED_WHILE_STARTING:
                    raise TransferProcessFailed(self._why_not_started(process, child))
                logger.warning("%s while starting, and is started again", child.describe_exit())
                self._start_again(number, process, child)
            if time.monotonic() > deadline:
                raise TransferProcessFailed(
                    f"{waiting[0][1].name} was not ready within {_START_TIMEOUT_S:.0f} s"
                )
            self._poller.poll(1.0)
            self._early += self.receive()

    def _why_not_started(self, process: _TransferProcess, child: HostedProcess) -> str:
        if child.exit_code and child.exit_code > 0:
            deadline = time.monotonic() + _FAULT_TIMEOUT_S
            while not process.fault and time.monotonic() < deadline:
                self._events.poll(100)
                self._early += self.receive()
        if process.fault:
            return f"{process.name} could not start: {process.fault}"
        return f"{child.describe_exit()} while starting; its log says why"
