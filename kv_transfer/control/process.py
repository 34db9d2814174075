"""The transfer process: `python -m edge.program kv_transfer.control.process`, with its
configuration on standard input.

    1. malloc is asked to keep its memory; then everything else is imported
    2. the worker's KV cache is mapped
    3. if peers pull from it: the gRPC server listens. A first `ProcessReport` says that we are
       ready
    4. commands from the scheduler half, progress from the worker; events and reports back.
       The loop that does all of it gives the signs of life
    5. SIGTERM, or the end of the parent

It never sees a token of a prompt, and listens on the configured address only.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from edge.address import join_address
from edge.logs.setup import setup_logging
from edge.printable import printable
from edge.security.credentials import Credentials
from host.child_process import read_config
from host.life_signs import SIGN_INTERVAL_S, LifeSign
from host.sockets.local_socket import Context, bind_socket
from host.sockets.message_reader import MessageReader
from host.termination import termination_fd
from kv_transfer.consumer.receiver import KVReceiver
from kv_transfer.control.control_channel import connect_events, listen_for_commands
from kv_transfer.control.own_host import advertised_host, cannot_listen, own_host, source_host
from kv_transfer.control.process_config import TransferProcessConfig
from kv_transfer.control.sizing import available_cores, choose_check_threads
from kv_transfer.errors import KVTransferError
from kv_transfer.layer_times import behind_others
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.pool.host_pool import HostPool, PoolConfig
from kv_transfer.memory.pool.store_address import StoreAddress
from kv_transfer.metadata import (
    AbortMeta,
    ComputedMeta,
    ExportMeta,
    KVPeer,
    ProcessEvent,
    ProcessFault,
    ProcessReport,
    RecvMeta,
    ReleaseMeta,
    SendMeta,
    StepProgress,
    TransferCommand,
    TransferEvent,
)
from kv_transfer.producer.layer_marks import LayerMarks
from kv_transfer.producer.pull_service import PullService
from kv_transfer.producer.sender import KVSender
from kv_transfer.producer.step_watch import StepWatch
from kv_transfer.producer.worker import steps_address
from kv_transfer.tier import TierCommand
from kv_transfer.transports.stream.ends import new_pull_server
from kv_transfer.wire.chunk import HEADER
from kv_transfer.wire.pull_server import PullServer

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_REPORT_INTERVAL_S = 0.1
_REPORT_DELAY_S = 0.02
"""A report waits this long: a transfer begins with a change, and what that asks for goes first."""
_CONTENTS_S = 1.0
"""Peers wait this long for what the disk tier holds: then nothing is computed that is known
soon."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


def keep_freed_memory() -> None:
    """glibc otherwise returns the pages of every freed message and faults them in again, which
    halves the rate. Costs some tens of MiB of resident memory. Other C libraries do as they do.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 << 20)


def collect_garbage_rarely() -> None:
    """Collects garbage rarely: what was imported stays, and chunks leave no cycles behind."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


class TransferProcess:
    """Wires a `KVSender`, a `KVReceiver` or both to the node and to the network."""

    def __init__(self, config: TransferProcessConfig) -> None:
        self._config = config
        self._credentials = Credentials(config.transfer.security)
        self._context = Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._layout = config.layout.of_rank(config.rank)
        self._events = connect_events(self._context, config)
        self._changed = asyncio.Event()
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cache = KVCacheView(
            config.handle,
            self._layout,
            inbox_bytes=config.transfer.process_staging_bytes if config.transfer.receives else 0,
            message_bytes=HEADER.size + max(config.transfer.chunk_bytes, self._layout.page_bytes),
        )
        self._cache.copies.on_error = self._stop
        self._me = KVPeer(engine_id=config.engine_id, epoch=config.epoch, layout=config.layout)
        self._address = ""
        self._commands_address = ""
        self._readers: list[MessageReader[Any]] = []
        self._sender: KVSender | None = None
        self._receiver: KVReceiver | None = None
        self._host_pool: HostPool | None = None

    async def run(self) -> None:
        """Runs until SIGTERM. Raises what went wrong; then the scheduler half starts another."""
        asyncio.get_running_loop().add_reader(termination_fd(), self._stop, None)
        server = await self._start()
        parts = [part for part in (self._sender, self._receiver) if part is not None]
        tasks = [
            asyncio.create_task(self._report_forever()),
            asyncio.create_task(self._give_signs()),
            *(asyncio.create_task(part.run()) for part in parts),
        ]
        for task in tasks:
            task.add_done_callback(self._stop_with)
        try:
            await self._end
        finally:
            for task in tasks:
                task.cancel()
            if server is not None:
                await server.close()
            if self._sender is not None:
                await self._sender.close()
            if self._receiver is not None:
                await self._receiver.close()
            if self._host_pool is not None:
                await self._host_pool.close()

    def tell_fault(self, reason: str) -> None:
        """Says why the process ends. It ends once that is sent, or cannot be."""
        fault = ProcessFault(self._config.process, self._config.generation, printable(reason))
        self._events.send(self._encoder.encode(fault))
        self._context.destroy()

    @property
    def _gpu(self) -> str:
        return self._cache.device.pci_address

    @property
    def _num_dropped(self) -> int:
        return sum(reader.num_dropped for reader in self._readers)

    def _stop(self, error: BaseException | None) -> None:
        if self._end.done():
            return
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)

    def _stop_with(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._stop(task.exception())

    async def _start(self) -> PullServer | None:
        config = self._config
        server = None
        num_slots = config.transfer.num_host_slots(config.layout.block_bytes)
        if num_slots:
            self._host_pool = HostPool(self._cache, pool_config(config, num_slots), self._emit)
            await self._host_pool.tell_contents(_CONTENTS_S)
        if config.transfer.sends:
            self._sender = KVSender(
                config.transfer,
                self._layout,
                config.rank,
                config.index,
                self._cache,
                self._emit,
                self._changed.set,
            )
            server = await self._listen(self._sender)
            if config.handle.marks_fd >= 0:
                watch = self._watch_steps(self._sender)
                steps = steps_address(config.engine_id, config.rank, config.index)
                self._read(
                    bind_socket(self._context, zmq.SocketType.PULL, steps),
                    StepProgress,
                    watch.handle,
                )
        if config.transfer.receives:
            self._receiver = KVReceiver(
                config.transfer,
                self._me,
                config.rank,
                config.index,
                self._cache,
                self._emit,
                self._changed.set,
                source_host(config, self._gpu),
            )
        commands, self._commands_address = listen_for_commands(self._context, config)
        self._read(commands, TransferCommand, self._handle_command)
        self._changed.set()
        return server

    def _watch_steps(self, sender: KVSender) -> StepWatch:
        handle, num_layers = self._config.handle, self._layout.num_layers
        marks = LayerMarks.attach(handle.pid, handle.marks_fd, num_layers)
        return StepWatch(marks, num_layers, handle.cuda is not None, sender.progress)

    async def _listen(self, sender: KVSender) -> PullServer:
        """Listens where settings say; after a restart on the port that we had before, which peers
        know. If another has that one now, any will do: peers whose pulls fail ask again.
        Raises `KVTransferError`."""
        transfer, host = self._config.transfer, own_host(self._config, self._gpu)
        service = PullService(transfer, self._me, sender)
        methods = service.methods()
        await sender.listen(methods)
        self._credentials.on_plaintext = self._changed.set
        server = new_pull_server(transfer, methods, self._credentials)
        try:
            port = await server.listen(host, self._config.fixed_port or self._config.port)
        except OSError as error:
            if self._config.fixed_port or not self._config.port:
                raise cannot_listen(host, self._config.fixed_port, error) from error
            logger.warning("port %d is lost, so peers learn another: %s", self._config.port, error)
            port = await server.listen(host, 0)
        self._address = join_address(advertised_host(self._config, host), port)
        return server

    def _handle_command(self, command: TransferCommand) -> None:
        sender, receiver = self._sender, self._receiver
        match command:
            case _ if isinstance(command, TierCommand):
                self._handle_host_tier(command)
            case AbortMeta(is_export=is_export) if sender is not None and receiver is not None:
                (sender if is_export else receiver).abort(command)
            case SendMeta() | ExportMeta() | AbortMeta() if sender is not None:
                self._handle_as_producer(sender, command)
            case _ if receiver is not None:
                self._handle_as_consumer(receiver, command)

    def _handle_host_tier(self, command: TierCommand) -> None:
        if self._host_pool is None:
            raise ValueError("there is no host tier here")
        self._host_pool.handle(command)

    @staticmethod
    def _handle_as_producer(sender: KVSender, command: TransferCommand) -> None:
        match command:
            case SendMeta():
                sender.send(command)
            case ExportMeta():
                sender.export(command)
            case AbortMeta():
                sender.abort(command)

    @staticmethod
    def _handle_as_consumer(receiver: KVReceiver, command: TransferCommand) -> None:
        match command:
            case RecvMeta():
                receiver.receive(command)
            case ComputedMeta():
                receiver.prompt_computed(command)
            case ReleaseMeta():
                receiver.release(command)
            case AbortMeta():
                receiver.abort(command)

    def _emit(self, event: ProcessEvent) -> None:
        num_others = self._config.layout.first_layer_on(self._config.rank)
        if num_others and isinstance(event, TransferEvent):
            layers = behind_others(event.stats.layers, num_others)
            stats = msgspec.structs.replace(event.stats, layers=layers)
            event = msgspec.structs.replace(event, stats=stats)
        if self._config.link is not None and isinstance(event, TransferEvent):
            event = msgspec.structs.replace(event, sent_at=time.monotonic())
        self._events.send(self._encoder.encode(event))

    def _read(self, socket: zmq.Socket[bytes], kind: object, handle: Callable[[T], None]) -> None:
        """Calls `handle` for every message that arrives."""
        reader: MessageReader[T] = MessageReader(socket, kind, "the node")
        self._readers.append(reader)

        def drain() -> None:
            # The descriptor tells of changes only, so nothing may be left behind.
            num_dropped = reader.num_dropped
            try:
                while (message := reader.next()) is not None:
                    handle(message)
            except Exception as error:
                self._stop(error)
            if reader.num_dropped > num_dropped:
                self._changed.set()

        loop = asyncio.get_running_loop()
        loop.add_reader(socket.fileno(), drain)
        loop.call_soon(drain)

    async def _report_forever(self) -> None:
        """Reports at once first: that says that we are ready."""
        delay_s = 0.0
        while True:
            await self._changed.wait()
            await asyncio.sleep(delay_s)
            delay_s = _REPORT_DELAY_S
            self._changed.clear()
            self._events.send(self._encoder.encode(self._report()))
            await asyncio.sleep(_REPORT_INTERVAL_S)

    async def _give_signs(self) -> None:
        """Gives signs of life until cancelled. From another host, reports are signs."""
        handle = self._config.life_sign
        give = LifeSign.attach(handle).give if handle is not None else None
        while True:
            if give is not None:
                give()
            elif self._config.link is not None:
                self._changed.set()
            await asyncio.sleep(SIGN_INTERVAL_S)

    def _report(self) -> ProcessReport:
        config, sender, receiver = self._config, self._sender, self._receiver
        report = ProcessReport(
            config.process,
            config.generation,
            self._address,
            commands_address=self._commands_address,
            dropped_messages=self._num_dropped,
        )
        if sender is not None:
            report = msgspec.structs.replace(
                report,
                staged_bytes=sender.staged_bytes,
                leases=sender.num_transfers,
                num_transfers=sender.num_transfers,
                num_pulls=sender.num_pulls,
                bytes_moved=sender.bytes_sent,
                leases_expired=sender.leases_expired,
                reclaimed={str(why): count for why, count in sender.reclaimed.items()},
                plaintext_connections=self._credentials.plaintext_connections.total(),
            )
        if receiver is not None:
            report = msgspec.structs.replace(
                report,
                num_transfers=report.num_transfers + receiver.num_transfers,
                num_pulls=report.num_pulls + receiver.num_pulls,
                bytes_moved=report.bytes_moved + receiver.received.total(),
                received=dict(receiver.received),
                corrupt_chunks=receiver.corrupt_chunks,
            )
        return report


def pool_config(config: TransferProcessConfig, num_slots: int) -> PoolConfig:
    """Returns our part of the tiers behind the cache."""
    transfer = config.transfer
    return PoolConfig(
        num_slots=num_slots,
        share=(config.index, transfer.num_processes),
        process=config.process,
        first_layer=config.layout.first_layer_on(config.rank),
        generation=config.generation,
        check_threads=choose_check_threads(
            available_cores(), transfer.num_processes * config.layout.num_ranks
        ),
        memory_path=Path(transfer.host_tier_path) if transfer.host_tier_path else None,
        disk_path=Path(transfer.disk_tier_path) if transfer.disk_tier_path else None,
        store=StoreAddress.parse(transfer.store_tier_url) if transfer.store_tier_url else None,
        store_host=transfer.hosts[0],
    )


async def _run(config: TransferProcessConfig) -> int:
    """Returns the exit code; what goes wrong is the scheduler half's to say, too."""
    process = TransferProcess(config)
    try:
        await process.run()
    except KVTransferError as error:
        logger.error("%s", error)
        process.tell_fault(str(error))
        return 1
    except Exception as error:
        process.tell_fault(f"{type(error).__name__}: {error}")
        raise
    return 0


def main() -> None:
    keep_freed_memory()
    config = read_config(TransferProcessConfig)
    setup_logging(config.log, f"kv transfer {config.engine_id}/{config.process}", is_child=True)
    time.sleep(config.start_delay_s)
    collect_garbage_rarely()
    sys.exit(asyncio.run(_run(config)))


if __name__ == "__main__":
    main()
