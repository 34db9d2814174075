"""The memory that a transfer held is free when it has ended, without a collection of garbage."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest
from kv_caches import layout
from kv_loopback import Loopback, LoopbackConsumer, LoopbackProducer, until
from nixl_pairs import NUM_TOKENS, HeldReads, both_empty, connected, kv_bytes, loopback, pull
from test_direct_copies import pulled_then_exported

from edge.h2.out_message import OutMessage
from kv_transfer.config import PullTransportName
from kv_transfer.consumer.recv_transfer import RecvTransfer
from kv_transfer.memory.staging import StagedChunk
from kv_transfer.metadata import TransferEventKind
from kv_transfer.producer.send_transfer import SendTransfer
from kv_transfer.transports.chunk_assembler import ChunkAssembler
from kv_transfer.transports.cuda_ipc.local_pull_client import _Connection as CallerConnection
from kv_transfer.transports.cuda_ipc.local_pull_server import _Connection as HolderConnection
from kv_transfer.transports.nixl.filled_slots import FilledSlot
from kv_transfer.transports.nixl.window_export import WindowExport
from kv_transfer.transports.nixl.window_reads import WindowRead
from kv_transfer.transports.open_pull import OpenPull
from kv_transfer.transports.pull_stream import PullStream
from kv_transfer.transports.stream.h2.connection import H2Connection
from kv_transfer.transports.stream.stream_export import SentChunk, StreamExport

FIRST_BYTE, STAGED, RELEASED, RECEIVED, FAILED, ABORTED = TransferEventKind
SHAPE = layout()
HEAVY = (
    RecvTransfer, PullStream, ChunkAssembler, H2Connection, SendTransfer, StreamExport, OpenPull,
    SentChunk,
    StagedChunk, OutMessage, CallerConnection, HolderConnection, WindowExport, FilledSlot,
    WindowRead,
)  # fmt: skip
"""These hold memory for KV, or lead to it."""


@pytest.fixture(scope="module", autouse=True)
def _others_are_left_out() -> None:
    """Collections look at what these tests make: beside all that hundreds of others have left, each
    takes seconds."""
    gc.collect()
    gc.freeze()


@contextmanager
def garbage_is_kept() -> Iterator[None]:
    """Whatever was left behind before is gone."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def complete(producer: LoopbackProducer, consumer: LoopbackConsumer) -> None:
    transfer_id = producer.export_computed(1, 100)
    consumer.pull(producer.peer, transfer_id, 100)
    await consumer.until_all(RECEIVED, transfer_id)
    consumer.release(producer.peer, transfer_id)
    await producer.until_all(RELEASED, transfer_id)


async def read_by_nixl(producer: LoopbackProducer, consumer: LoopbackConsumer) -> None:
    assert await pull(producer, consumer, 2) < kv_bytes(SHAPE)
    await both_empty(producer, consumer)


async def given_up_by_nixl(producer: LoopbackProducer, consumer: LoopbackConsumer) -> None:
    """While it is read."""
    with pytest.MonkeyPatch.context() as patch:
        held = HeldReads(patch)
        transfer_id, _ = await pulled_then_exported(producer, consumer, 2, NUM_TOKENS)
        await until(lambda: held.num_held > 0)
        consumer.abort(transfer_id)
        await consumer.until_all(ABORTED, transfer_id)
        await until(lambda: not producer.senders[0].num_pulls)
        consumer.release(producer.peer, transfer_id, complete=False)
        await producer.until_all(ABORTED, transfer_id)
        held.go()
        await both_empty(producer, consumer)


async def aborted(producer: LoopbackProducer, consumer: LoopbackConsumer) -> None:
    transfer_id = "a" * 32
    consumer.pull(producer.peer, transfer_id, 100)
    await until(lambda: consumer.receivers[0].num_pulls > 0)
    consumer.abort(transfer_id)
    await consumer.until_all(ABORTED, transfer_id)


Way = Callable[[LoopbackProducer, LoopbackConsumer], Awaitable[None]]


async def garbage_of(
    way: Way, producer: LoopbackProducer, consumer: LoopbackConsumer
) -> Counter[type]:
    """Counts what of `HEAVY` a way leaves to the collector."""
    await until(lambda: not producer.senders[0].num_pulls)
    with garbage_is_kept():
        await way(producer, consumer)
        await until(lambda: not producer.senders[0].num_pulls)
        gc.collect()
        return Counter(type(one) for one in gc.garbage if isinstance(one, HEAVY))


@pytest.mark.parametrize(
    ("transport", "data"),
    [("h2", "stream"), ("grpcio", "stream"), ("h2", "cuda_ipc,stream")],
)
@pytest.mark.parametrize("way", [complete, aborted])
async def test_nothing_waits_for_the_collector(
    way: Way, transport: PullTransportName, data: str
) -> None:
    loopback = Loopback(SHAPE, SHAPE, num_streams=2, transport=transport, data=data)
    async with loopback as (producer, consumer):
        await complete(producer, consumer)
        assert not await garbage_of(way, producer, consumer)


@pytest.mark.parametrize("way", [read_by_nixl, given_up_by_nixl])
async def test_nor_does_what_windows_hold(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    async with loopback(windows=(16384, 16384)) as (producer, consumer):
        await connected(producer, consumer)
        assert not await garbage_of(way, producer, consumer)
