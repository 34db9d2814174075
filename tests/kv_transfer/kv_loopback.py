"""Both ends of the data plane in one event loop, with real gRPC between them.

A `LoopbackProducer` has a `KVSender` and a server for every (rank, process); a `LoopbackConsumer`
a `KVReceiver`. Commands are handed over directly, events are collected.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict

from kv_caches import Blocks, GroupBlocks, RankCache, by_group

from edge.security.credentials import Credentials
from kv_transfer.config import KVTransferConfig, PullTransportName
from kv_transfer.consumer.receiver import KVReceiver
from kv_transfer.layout import KVLayout
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.devices.device import MemoryDevice
from kv_transfer.metadata import (
    AbortMeta,
    ExportMeta,
    KVPeer,
    RecvMeta,
    ReleaseMeta,
    SendMeta,
    StepProgress,
    TransferEvent,
    TransferEventKind,
)
from kv_transfer.producer.pull_service import PullService
from kv_transfer.producer.sender import KVSender
from kv_transfer.transports.cuda_ipc.producer import CudaIpcProducer
from kv_transfer.transports.nixl.consumer import NixlConsumer
from kv_transfer.transports.nixl.producer import NixlProducer
from kv_transfer.transports.stream.ends import new_pull_server
from kv_transfer.transports.stream.producer import StreamProducer
from kv_transfer.wire.pull_server import PullServer
from tests.awaited import until as until

TIMEOUT_S = 60.0
_ENDS = set(TransferEventKind) - {TransferEventKind.STAGED, TransferEventKind.FIRST_BYTE}


def new_transfer_id() -> str:
    return uuid.uuid4().hex


async def all_tasks_are_held_up(seconds: float) -> None:
    """Stops this process's event loop while its other tasks sleep."""
    is_over = asyncio.Event()

    def hold_up() -> None:
        time.sleep(seconds)
        is_over.set()

    asyncio.get_running_loop().call_soon(hold_up)
    await is_over.wait()


def stream_of(sender: KVSender) -> StreamProducer:
    (stream,) = (one for one in sender.transports if isinstance(one, StreamProducer))
    return stream


class Node:
    """Holds what both roles share: caches, blocks and the events of all processes."""

    def __init__(
        self,
        config: KVTransferConfig,
        shape: KVLayout,
        num_blocks: int,
        device: MemoryDevice | None = None,
    ) -> None:
        self.config = config
        self.layout = shape
        self.num_processes = shape.tp_size * config.num_processes
        self.caches = [RankCache(shape, rank, num_blocks) for rank in range(shape.tp_size)]
        self.views = [
            KVCacheView(
                cache.handle, shape, inbox_bytes=config.process_staging_bytes, device=device
            )
            for cache in self.caches
        ]
        self.blocks = Blocks(num_blocks)
        self.events: dict[tuple[str, int], list[TransferEvent]] = defaultdict(list)

    def emit(self, event: TransferEvent) -> None:
        self.events[event.transfer_id, event.attempt].append(event)

    def count(self, kind: TransferEventKind, transfer_id: str, attempt: int = 0) -> int:
        return sum(event.kind is kind for event in self.events[transfer_id, attempt])

    async def until_all(
        self, kind: TransferEventKind, transfer_id: str, attempt: int = 0
    ) -> list[TransferEvent]:
        """Waits until every process has said so. Another end than this is told at once."""
        events = self.events[transfer_id, attempt]

        def is_over() -> bool:
            ended = [event for event in events if event.kind in _ENDS]
            assert kind not in _ENDS or all(event.kind is kind for event in ended), ended
            return self.count(kind, transfer_id, attempt) == self.num_processes

        await until(is_over)
        return [event for event in events if event.kind is kind]

    def parts(self) -> list[tuple[int, int]]:
        """Returns (rank, process index) in the order of process numbers."""
        return [
            (rank, index)
            for rank in range(self.layout.tp_size)
            for index in range(self.config.num_processes)
        ]

    def new_blocks(self, num_tokens: int) -> GroupBlocks:
        """Returns blocks for a prompt. Those of the only group stand alone."""
        block_ids = self.blocks.take_all(self.layout, num_tokens)
        return block_ids if len(block_ids) > 1 else block_ids[0]

    def close_caches(self) -> None:
        for view in self.views:
            view.close()
        for cache in self.caches:
            cache.close()


class LoopbackProducer(Node):
    def __init__(
        self,
        config: KVTransferConfig,
        shape: KVLayout,
        num_blocks: int = 64,
        epoch: int = 7,
        device: MemoryDevice | None = None,
    ) -> None:
        super().__init__(config, shape, num_blocks, device)
        self.peer = KVPeer(engine_id="prefill", epoch=epoch, layout=shape)
        self.senders: list[KVSender] = []
        self._servers: list[PullServer] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        addresses = []
        for rank, index in self.parts():
            sender = KVSender(
                self.config, self.layout, rank, index, self.views[rank], self.emit, lambda: None
            )
            service = PullService(self.config, self.peer, sender)
            methods = service.methods()
            await sender.listen(methods)
            server = new_pull_server(self.config, methods, Credentials(self.config.security))
            addresses.append(f"127.0.0.1:{await server.listen('127.0.0.1', 0)}")
            self.senders.append(sender)
            self._servers.append(server)
            self._tasks.append(asyncio.create_task(sender.run()))
        step = self.config.num_processes
        self.peer = KVPeer(
            engine_id=self.peer.engine_id,
            epoch=self.peer.epoch,
            layout=self.layout,
            endpoints=tuple(tuple(addresses[i : i + step]) for i in range(0, len(addresses), step)),
        )

    def export(self, transfer_id: str, num_tokens: int, attempt: int = 0) -> None:
        for sender in self.senders:
            sender.export(ExportMeta(transfer_id, attempt, num_tokens))

    def send(
        self,
        transfer_id: str,
        step_id: int,
        tokens: range,
        block_ids: GroupBlocks,
        num_tokens: int,
        attempt: int = 0,
    ) -> None:
        for sender in self.senders:
            sender.send(
                SendMeta(
                    transfer_id, attempt, step_id, tokens.start, len(tokens), by_group(block_ids)
                )
            )

    def compute(
        self, seed: int, step_id: int, layer: int, tokens: range, block_ids: GroupBlocks
    ) -> None:
        """One layer of one step, on every rank."""
        for cache in self.caches:
            cache.write(seed, layer, tokens, block_ids)
        for sender in self.senders:
            sender.progress(StepProgress(step_id, layer + 1))

    def compute_all(self, seed: int, num_tokens: int, block_ids: GroupBlocks) -> None:
        """As a cached prefix: before anybody is told."""
        for cache in self.caches:
            for layer in range(self.layout.num_layers):
                cache.write(seed, layer, range(num_tokens), block_ids)

    def export_computed(self, seed: int, num_tokens: int, attempt: int = 0) -> str:
        """A whole prompt at once. Its transfer id."""
        transfer_id = new_transfer_id()
        block_ids = self.new_blocks(num_tokens)
        self.compute_all(seed, num_tokens, block_ids)
        self.export(transfer_id, num_tokens, attempt)
        self.send(transfer_id, -1, range(num_tokens), block_ids, num_tokens, attempt)
        return transfer_id

    def abort(self, transfer_id: str, attempt: int = 0) -> None:
        for sender in self.senders:
            sender.abort(AbortMeta(transfer_id, attempt))

    @property
    def staged_bytes(self) -> int:
        return sum(sender.staged_bytes for sender in self.senders)

    async def until_empty(self) -> None:
        """No transfer, no staged byte, no call is left; calls take a moment to end."""
        for sender in self.senders:
            assert sender.num_transfers == 0
            assert sender.staged_bytes == 0
            for transport in sender.transports:
                if isinstance(transport, CudaIpcProducer):
                    assert transport.leases.num_held == 0
                if isinstance(transport, NixlProducer) and transport.filled is not None:
                    assert transport.filled.num_unread == transport.filled.leases.num_held == 0
                    slots = transport.filled.window.slots
                    assert (slots.num_free, slots.num_waiting) == (slots.num_slots, 0)
        await until(lambda: all(sender.num_pulls == 0 for sender in self.senders))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            await server.close()
        for sender in self.senders:
            await sender.close()
        self.senders.clear()
        self.close_caches()


class LoopbackConsumer(Node):
    def __init__(
        self,
        config: KVTransferConfig,
        shape: KVLayout,
        num_blocks: int = 64,
        device: MemoryDevice | None = None,
    ) -> None:
        super().__init__(config, shape, num_blocks, device)
        me = KVPeer(engine_id="decode", epoch=1, layout=shape)
        self.receivers = [
            KVReceiver(config, me, rank, index, self.views[rank], self.emit, lambda: None)
            for rank, index in self.parts()
        ]

    def pull(
        self,
        peer: KVPeer,
        transfer_id: str,
        num_tokens: int,
        first_token: int = 0,
        attempt: int = 0,
        block_ids: GroupBlocks | None = None,
    ) -> GroupBlocks:
        """Into new blocks, unless given; their ids."""
        if block_ids is None:
            block_ids = self.new_blocks(num_tokens)
        for receiver in self.receivers:
            receiver.receive(
                RecvMeta(transfer_id, attempt, peer, by_group(block_ids), first_token, num_tokens)
            )
        return block_ids

    def abort(self, transfer_id: str, attempt: int = 0) -> None:
        for receiver in self.receivers:
            receiver.abort(AbortMeta(transfer_id, attempt))

    def release(
        self, peer: KVPeer, transfer_id: str, attempt: int = 0, complete: bool = True
    ) -> None:
        self.receivers[0].release(ReleaseMeta(transfer_id, attempt, peer, complete))

    def check(self, seed: int, tokens: range, block_ids: GroupBlocks) -> None:
        for cache in self.caches:
            cache.check(seed, tokens, block_ids)

    async def until_empty(self) -> None:
        for receiver in self.receivers:
            assert receiver.num_transfers == 0
            assert receiver.num_pulls == 0
            for transport in receiver._transports:
                if isinstance(transport, NixlConsumer) and transport.queue is not None:
                    await until(transport.queue.is_empty)

    async def close(self) -> None:
        for receiver in self.receivers:
            await receiver.close()
        self.receivers.clear()
        self.close_caches()


class Loopback:
    """`async with Loopback(producer layout, consumer layout) as (producer, consumer)`."""

    def __init__(
        self,
        theirs: KVLayout,
        ours: KVLayout,
        *,
        num_streams: int = 4,
        producer_processes: int = 1,
        consumer_processes: int = 1,
        chunk_bytes: int = 2048,
        staging_bytes: int = 4 << 20,
        lease_s: float = 30.0,
        stall_timeout_s: float = 20.0,
        transport: PullTransportName = "h2",
        server: PullTransportName = "h2",
        data: str = "stream",
        windows: tuple[int, int] = (1 << 20, 1 << 20),
        devices: tuple[MemoryDevice | None, MemoryDevice | None] = (None, None),
    ) -> None:
        producer_config = KVTransferConfig(
            kv_role="kv_producer",
            num_processes=producer_processes,
            chunk_bytes=chunk_bytes,
            staging_bytes=staging_bytes,
            lease_s=lease_s,
            transports=data,
            nixl_window_bytes=windows[0],
            stall_timeout_s=stall_timeout_s,
            pull_transport=server,
        )
        consumer_config = KVTransferConfig(
            kv_role="kv_consumer",
            num_processes=consumer_processes,
            num_streams=num_streams,
            receive_threads=2,
            chunk_bytes=chunk_bytes,
            stall_timeout_s=stall_timeout_s,
            pull_transport=transport,
            staging_bytes=staging_bytes,
            transports=data,
            nixl_window_bytes=windows[1],
        )
        self.producer = LoopbackProducer(producer_config, theirs, device=devices[0])
        self.consumer = LoopbackConsumer(consumer_config, ours, device=devices[1])

    async def __aenter__(self) -> tuple[LoopbackProducer, LoopbackConsumer]:
        await self.producer.start()
        return self.producer, self.consumer

    async def __aexit__(self, *_: object) -> None:
        await self.consumer.close()
        await self.producer.close()
