"""Nothing is left of what goes wrong between two nodes. Real gRPC, one event loop."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import grpc.aio
import pytest
from kv_caches import layout
from kv_loopback import (
    Loopback,
    LoopbackConsumer,
    LoopbackProducer,
    all_tasks_are_held_up,
    new_transfer_id,
    stream_of,
    until,
)
from kv_proxy import Proxy
from msgspec.structs import replace as with_fields

from kv_transfer.config import PullTransportName
from kv_transfer.layout import KVLayout
from kv_transfer.metadata import ComputedMeta, KVPeer, Reclaim, TransferEventKind
from kv_transfer.producer import sender as sender_module
from kv_transfer.producer.early_pulls import EarlyPulls
from kv_transfer.producer.pull_service import PullService
from kv_transfer.producer.send_transfer import SendTransfer
from kv_transfer.producer.sender import KVSender
from kv_transfer.state import LateMessage
from kv_transfer.wire.chunk import ChunkKind
from kv_transfer.wire.handshake import peer_to_proto
from tandem_pb import kv_transfer_pb2 as pb

FIRST_BYTE, STAGED, RELEASED, RECEIVED, FAILED, ABORTED = TransferEventKind
SHAPE = layout()
both_transports = pytest.mark.parametrize("transport", ["h2", "grpcio"])


def reason(node: LoopbackProducer | LoopbackConsumer, transfer_id: str) -> str:
    return next(e.reason for e in node.events[transfer_id, 0] if e.kind is FAILED)


# Damaged and lost bytes -------------------------------------------------------------------------


@both_transports
@pytest.mark.parametrize("offset", [20, 40, 200], ids=["name", "position", "payload"])
async def test_a_damaged_chunk_is_pulled_again(offset: int, transport: PullTransportName) -> None:
    proxy = Proxy(lambda n: offset if n in (0, 3) else None)
    async with Loopback(SHAPE, SHAPE, num_streams=2, transport=transport) as (producer, consumer):
        peer = await proxy.start(producer.peer)
        transfer_id = producer.export_computed(1, 100)
        await producer.until_all(STAGED, transfer_id)
        block_ids = consumer.pull(peer, transfer_id, 100)
        await consumer.until_all(RECEIVED, transfer_id)
        consumer.check(1, range(100), block_ids)
        assert consumer.receivers[0].corrupt_chunks == 2
        consumer.release(peer, transfer_id)
        await producer.until_all(RELEASED, transfer_id)
        await producer.until_empty()
        await consumer.until_empty()
        await proxy.close()


@both_transports
async def test_a_chunk_that_is_damaged_twice_is_final(
    transport: PullTransportName,
) -> None:
    proxy = Proxy(lambda n: 200)
    async with Loopback(SHAPE, SHAPE, num_streams=1, transport=transport) as (producer, consumer):
        peer = await proxy.start(producer.peer)
        transfer_id = producer.export_computed(1, 30)
        await producer.until_all(STAGED, transfer_id)
        block_ids = consumer.pull(peer, transfer_id, 30)
        (event,) = await consumer.until_all(FAILED, transfer_id)
        assert event.retryable and "damaged twice" in event.reason
        assert consumer.caches[0].untouched_except([])
        assert len(block_ids) == 2
        consumer.release(peer, transfer_id, complete=False)
        await producer.until_all(ABORTED, transfer_id)
        await producer.until_empty()
        await consumer.until_empty()
        await proxy.close()


@both_transports
async def test_a_link_that_only_garbles_is_given_up_early(transport: PullTransportName) -> None:
    proxy = Proxy(lambda n: 200)
    async with Loopback(SHAPE, SHAPE, num_streams=1, transport=transport) as (producer, consumer):
        peer = await proxy.start(producer.peer)
        transfer_id = producer.export_computed(1, 900)
        await producer.until_all(STAGED, transfer_id)
        consumer.pull(peer, transfer_id, 900)
        await consumer.until_all(FAILED, transfer_id)
        assert consumer.receivers[0].corrupt_chunks == 17, "of 87"
        consumer.release(peer, transfer_id, complete=False)
        await producer.until_all(ABORTED, transfer_id)
        await producer.until_empty()
        await proxy.close()


@both_transports
async def test_a_stalled_link_times_out_and_leases_end(
    transport: PullTransportName,
) -> None:
    proxy = Proxy()
    loopback = Loopback(SHAPE, SHAPE, stall_timeout_s=0.5, lease_s=0.8, transport=transport)
    async with loopback as (producer, consumer):
        peer = await proxy.start(producer.peer)
        transfer_id = new_transfer_id()
        source = producer.blocks.take(SHAPE, 100)
        producer.export(transfer_id, 100)
        producer.send(transfer_id, 1, range(100), source, 100)
        consumer.pull(peer, transfer_id, 100)
        producer.compute(1, 1, 0, range(100), source)
        await until(lambda: consumer.count(FIRST_BYTE, transfer_id) == 1)
        proxy.is_stalled = True
        (event,) = await consumer.until_all(FAILED, transfer_id)
        assert "said nothing for 0.5 s" in event.reason and event.retryable
        await consumer.until_empty()
        await proxy.close()
        producer.compute(1, 1, 2, range(100), source)
        await producer.until_all(FAILED, transfer_id)
        assert "lease" in reason(producer, transfer_id)
        await until(lambda: producer.senders[0].num_pulls == 0)
        await producer.until_empty()


class Heartbeats:
    """Counts those that a producer sends from now on, over all its streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_sent = 0
        pull_service = PullService._mark

        async def count(service: PullService, kind: ChunkKind, *rest: Any) -> None:
            await pull_service(service, kind, *rest)
            self.num_sent += kind is ChunkKind.HEARTBEAT

        monkeypatch.setattr(PullService, "_mark", count)

    async def until_more(self, count: int) -> None:
        stop = self.num_sent + count
        await until(lambda: self.num_sent >= stop)


@both_transports
async def test_waiting_for_a_slow_prompt_is_not_a_stall(
    transport: PullTransportName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four heartbeats are one limit: they are waited for before the export, and behind it."""
    heartbeats = Heartbeats(monkeypatch)
    limits = {"stall_timeout_s": 0.4, "lease_s": 3600.0}
    loopback = Loopback(SHAPE, SHAPE, num_streams=1, transport=transport, **limits)
    async with loopback as (producer, consumer):
        transfer_id = new_transfer_id()
        source = producer.blocks.take(SHAPE, 40)
        block_ids = consumer.pull(producer.peer, transfer_id, 40)
        await heartbeats.until_more(6)
        producer.export(transfer_id, 40)
        producer.send(transfer_id, 1, range(40), source, 40)
        await heartbeats.until_more(6)
        for layer in range(3):
            producer.compute(1, 1, layer, range(40), source)
        await consumer.until_all(RECEIVED, transfer_id)
        consumer.check(1, range(40), block_ids)
        consumer.release(producer.peer, transfer_id)
        await producer.until_all(RELEASED, transfer_id)


@both_transports
async def test_a_peer_that_only_beats_its_heart_has_stalled(
    transport: PullTransportName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the prompt is computed. Before, nothing says that KV should come."""
    heartbeats = Heartbeats(monkeypatch)
    limits = {"stall_timeout_s": 0.4, "lease_s": 3600.0}
    loopback = Loopback(SHAPE, SHAPE, num_streams=1, transport=transport, **limits)
    async with loopback as (producer, consumer):
        transfer_id = new_transfer_id()
        source = producer.blocks.take(SHAPE, 40)
        producer.export(transfer_id, 40)
        producer.send(transfer_id, 1, range(40), source, 40)
        consumer.pull(producer.peer, transfer_id, 40)
        producer.compute(1, 1, 0, range(40), source)
        await until(lambda: consumer.count(FIRST_BYTE, transfer_id) == 1)
        await heartbeats.until_more(6)
        assert consumer.count(FAILED, transfer_id) == 0
        (receiver,) = consumer.receivers
        receiver.prompt_computed(ComputedMeta(transfer_id, 0))
        (event,) = await consumer.until_all(FAILED, transfer_id)
        assert "sent no KV for 0.4 s" in event.reason and event.retryable
        await consumer.until_empty()
        receiver.prompt_computed(ComputedMeta(transfer_id, 0))
        consumer.release(producer.peer, transfer_id, complete=False)
        await producer.until_all(ABORTED, transfer_id)
        await producer.until_empty()


async def test_a_process_that_was_held_up_itself_blames_nobody() -> None:
    """The socket holds, unread, what the other side said meanwhile."""
    async with Loopback(SHAPE, SHAPE, stall_timeout_s=0.8) as (producer, consumer):
        transfer_id = new_transfer_id()
        source = producer.blocks.take(SHAPE, 40)
        producer.export(transfer_id, 40)
        block_ids = consumer.pull(producer.peer, transfer_id, 40)
        await until(lambda: producer.senders[0].num_pulls > 0)
        consumer.receivers[0].prompt_computed(ComputedMeta(transfer_id, 0))
        await all_tasks_are_held_up(1.0)
        producer.compute_all(1, 40, source)
        producer.send(transfer_id, -1, range(40), source, 40)
        await consumer.until_all(RECEIVED, transfer_id)
        consumer.check(1, range(40), block_ids)
        consumer.release(producer.peer, transfer_id)
        await producer.until_all(RELEASED, transfer_id)


# Aborts -----------------------------------------------------------------------------------------


async def at_stage(
    stage: str, producer: LoopbackProducer, consumer: LoopbackConsumer
) -> tuple[str, list[int]]:
    """Brings one transfer of 100 tokens to a stage of its life."""
    transfer_id = new_transfer_id()
    source = producer.blocks.take(SHAPE, 100)
    target = consumer.pull(producer.peer, transfer_id, 100)
    if stage == "pulled before the export":
        await until(lambda: consumer.receivers[0].num_pulls > 0)
        return transfer_id, target
    producer.export(transfer_id, 100)
    if stage == "exported":
        return transfer_id, target
    producer.send(transfer_id, 1, range(60), source, 100)
    producer.compute(1, 1, 0, range(60), source)
    await until(lambda: consumer.count(FIRST_BYTE, transfer_id) == consumer.num_processes)
    if stage == "some layers sent":
        return transfer_id, target
    producer.compute(1, 1, 2, range(60), source)
    producer.send(transfer_id, 2, range(60, 100), source, 100)
    producer.compute(1, 2, 2, range(60, 100), source)
    await producer.until_all(STAGED, transfer_id)
    if stage == "staged":
        return transfer_id, target
    await consumer.until_all(RECEIVED, transfer_id)
    return transfer_id, target


ONLY_THE_ABORT_FREES = {"lease_s": 3600.0, "stall_timeout_s": 3600.0}
"""No timer can have done it."""
STAGES = ["pulled before the export", "exported", "some layers sent", "staged", "received"]


@both_transports
@pytest.mark.parametrize("stage", STAGES)
async def test_the_puller_aborts(stage: str, transport: PullTransportName) -> None:
    loopback = Loopback(SHAPE, SHAPE, num_streams=3, transport=transport, **ONLY_THE_ABORT_FREES)
    async with loopback as (producer, consumer):
        transfer_id, target = await at_stage(stage, producer, consumer)
        consumer.abort(transfer_id)
        if stage == "received":
            assert consumer.count(ABORTED, transfer_id) == 0
        else:
            await until(
                lambda: (
                    consumer.count(ABORTED, transfer_id) + consumer.count(RECEIVED, transfer_id)
                    == 1
                )
            )
        after = consumer.caches[0].words[:, target].copy()
        consumer.release(producer.peer, transfer_id, complete=False)
        if stage == "pulled before the export":
            await until(lambda: not consumer.receivers[0]._releases)
            producer.export(transfer_id, 100)
        (event,) = await producer.until_all(ABORTED, transfer_id)
        assert "gave up" in event.reason
        assert producer.senders[0].reclaimed == {Reclaim.GIVEN_UP: 1}
        await until(lambda: producer.senders[0].num_pulls == 0)
        await producer.until_empty()
        await consumer.until_empty()
        assert (consumer.caches[0].words[:, target] == after).all(), "no writer is left"


@both_transports
@pytest.mark.parametrize("stage", STAGES)
async def test_the_holder_aborts(stage: str, transport: PullTransportName) -> None:
    loopback = Loopback(SHAPE, SHAPE, num_streams=3, transport=transport, **ONLY_THE_ABORT_FREES)
    async with loopback as (producer, consumer):
        transfer_id, _ = await at_stage(stage, producer, consumer)
        producer.abort(transfer_id)
        await producer.until_all(ABORTED, transfer_id)
        await until(
            lambda: consumer.count(FAILED, transfer_id) + consumer.count(RECEIVED, transfer_id) == 1
        )
        if consumer.count(FAILED, transfer_id):
            event = next(e for e in consumer.events[transfer_id, 0] if e.kind is FAILED)
            assert event.retryable
        await until(lambda: producer.senders[0].num_pulls == 0)
        await producer.until_empty()
        await consumer.until_empty()
        producer.abort(transfer_id)
        producer.export(transfer_id, 100)
        assert producer.senders[0].num_transfers == 0, "it cannot come back"


async def test_an_abort_before_anything_else_is_answered_and_remembered() -> None:
    async with Loopback(SHAPE, SHAPE) as (producer, consumer):
        transfer_id = new_transfer_id()
        consumer.abort(transfer_id)
        producer.abort(transfer_id)
        assert consumer.count(ABORTED, transfer_id) == 1
        assert producer.count(ABORTED, transfer_id) == 1
        consumer.pull(producer.peer, transfer_id, 40)
        producer.export(transfer_id, 40)
        await producer.until_empty()
        await consumer.until_empty()


# Attempts and epochs ----------------------------------------------------------------------------


async def test_a_new_attempt_is_not_hurt_by_what_is_left_of_the_old() -> None:
    async with Loopback(SHAPE, SHAPE) as (producer, consumer):
        transfer_id, target = await at_stage("some layers sent", producer, consumer)
        consumer.abort(transfer_id)
        await consumer.until_all(ABORTED, transfer_id)
        consumer.release(producer.peer, transfer_id, complete=False)
        await producer.until_all(ABORTED, transfer_id)

        source = producer.blocks.take(SHAPE, 100)
        producer.compute_all(2, 100, source)
        consumer.pull(producer.peer, transfer_id, 100, attempt=1, block_ids=target)
        producer.export(transfer_id, 100, attempt=1)
        producer.send(transfer_id, 5, range(100), source, 100)
        producer.abort(transfer_id)
        consumer.abort(transfer_id)
        producer.send(transfer_id, -1, range(100), source, 100, attempt=1)
        await consumer.until_all(RECEIVED, transfer_id, attempt=1)
        consumer.check(2, range(100), target)
        consumer.release(producer.peer, transfer_id, attempt=0, complete=False)
        await until(lambda: not consumer.receivers[0]._releases)
        assert producer.senders[0].num_transfers == 1, "a late release of the old attempt"
        consumer.release(producer.peer, transfer_id, attempt=1)
        await producer.until_all(RELEASED, transfer_id, attempt=1)
        await producer.until_empty()
        await consumer.until_empty()


async def test_a_restarted_node_is_another_node() -> None:
    async with Loopback(SHAPE, SHAPE) as (producer, consumer):
        transfer_id = producer.export_computed(1, 40)
        old = with_fields(producer.peer, epoch=producer.peer.epoch - 1)
        consumer.pull(old, transfer_id, 40)
        (event,) = await consumer.until_all(FAILED, transfer_id)
        assert "restarted" in event.reason and event.retryable
        async with grpc.aio.insecure_channel(producer.peer.endpoints[0][0]) as channel:
            pull = channel.unary_stream(
                "/tandem.v1.KVTransfer/PullKV", request_serializer=pb.PullRequest.SerializeToString
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await pull(pb.PullRequest(transfer_id=transfer_id, epoch=old.epoch)).read()
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert producer.senders[0].num_transfers == 1
        consumer.release(producer.peer, transfer_id)
        await producer.until_all(RELEASED, transfer_id)


async def test_somebody_else_at_the_address() -> None:
    async with Loopback(SHAPE, SHAPE) as (producer, consumer):
        wrong = with_fields(producer.peer, engine_id="another")
        transfer_id = new_transfer_id()
        consumer.pull(wrong, transfer_id, 40)
        (event,) = await consumer.until_all(FAILED, transfer_id)
        assert "expected engine another" in event.reason


# Handshake --------------------------------------------------------------------------------------

(GROUP,) = SHAPE.groups
K, V = GROUP.planes


def with_group(**changes: object) -> KVLayout:
    return with_fields(SHAPE, groups=(with_fields(GROUP, **changes),))


def with_values(**changes: object) -> KVLayout:
    return with_group(planes=(K, with_fields(V, **changes)))


DIFFERENCES = {
    "protocol_version": with_fields(with_group(dtype="float16"), protocol_version=1),
    "model_hash": with_fields(SHAPE, model_hash="another"),
    "len(groups)": with_fields(SHAPE, groups=(GROUP, GROUP)),
    "groups[0].layers": with_group(layers=(0, 1, 2, 3)),
    "groups[0].dtype": with_group(dtype="float16"),
    "groups[0].window": with_group(window=16),
    "groups[0].block_size": with_group(block_size=0),
    "len(groups[0].planes)": with_group(planes=(K,)),
    "groups[0].planes[1].name": with_values(name="latent"),
    "groups[0].planes[1].heads": with_values(heads=4),
    "groups[0].planes[1].row_bytes": with_values(row_bytes=32),
    "groups[0].planes[1].replicated": with_values(replicated=True),
    "tp_size": with_fields(SHAPE, tp_size=3),
}


@pytest.mark.parametrize("field", DIFFERENCES)
async def test_a_mismatch_names_the_field(field: str) -> None:
    """Known beforehand, found by the puller's handshake, and refused by the holder."""
    other = DIFFERENCES[field]
    async with Loopback(SHAPE, SHAPE) as (producer, consumer):
        known = with_fields(producer.peer, layout=other)
        transfer_id = new_transfer_id()
        consumer.pull(known, transfer_id, 40)
        (event,) = await consumer.until_all(FAILED, transfer_id)
        assert f"differ in {field}" in event.reason and not event.retryable

        async with grpc.aio.insecure_channel(producer.peer.endpoints[0][0]) as channel:
            handshake = channel.unary_unary(
                "/tandem.v1.KVTransfer/Handshake",
                request_serializer=pb.KVPeer.SerializeToString,
                response_deserializer=pb.KVPeer.FromString,
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await handshake(peer_to_proto(KVPeer(engine_id="d", epoch=1, layout=other)))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert f"differ in {field}" in (refused.value.details() or "")


async def test_nodes_that_lie_about_their_layout_find_out() -> None:
    """The peer's layout was told wrongly, so only the handshake can show the difference."""
    async with Loopback(layout(num_layers=4), SHAPE) as (producer, consumer):
        told = with_fields(producer.peer, layout=SHAPE)
        transfer_id = new_transfer_id()
        consumer.pull(told, transfer_id, 40)
        (event,) = await consumer.until_all(FAILED, transfer_id)
        assert "differ in groups[0].layers" in event.reason


# Leases, memory, early pulls --------------------------------------------------------------------


async def test_kv_that_nobody_pulls_is_dropped_when_its_lease_ends() -> None:
    async with Loopback(SHAPE, SHAPE, lease_s=0.5) as (producer, _):
        started = time.monotonic()
        exported_only = new_transfer_id()
        producer.export(exported_only, 40)
        staged = producer.export_computed(1, 40)
        await producer.until_all(STAGED, staged)
        assert producer.staged_bytes > 0
        for transfer_id in (staged, exported_only):
            (event,) = await producer.until_all(FAILED, transfer_id)
            assert "lease" in event.reason and event.retryable
        assert time.monotonic() - started >= 0.5
        assert producer.senders[0].reclaimed == {Reclaim.LEASE_ENDED: 2}
        await producer.until_empty()


async def test_kv_that_is_pulled_for_ever_is_dropped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message that leaves renews the lease, of which there are a few behind the last token."""
    monkeypatch.setattr(sender_module, "_MOST_LEASES", 3)
    async with Loopback(SHAPE, SHAPE, lease_s=0.5) as (producer, _):
        transfer_id = producer.export_computed(1, 40)
        await producer.until_all(STAGED, transfer_id)
        (sender,) = producer.senders
        started = time.monotonic()
        while (export := held(sender, transfer_id)) is not None:
            sender.was_sent(export, 1)
            await asyncio.sleep(0.01)
        assert time.monotonic() - started >= 1.0
        (event,) = await producer.until_all(FAILED, transfer_id)
        assert "pulled for 1.5 s and not released" in event.reason
        await producer.until_empty()


def held(sender: KVSender, transfer_id: str) -> SendTransfer | None:
    try:
        return sender.find(transfer_id, 0)
    except LateMessage:
        return None


async def test_leases_do_not_run_while_their_process_is_held_up() -> None:
    """The pull may be in the socket, unread."""
    async with Loopback(SHAPE, SHAPE, lease_s=0.8) as (producer, consumer):
        transfer_id = producer.export_computed(1, 40)
        await producer.until_all(STAGED, transfer_id)
        await all_tasks_are_held_up(1.0)
        block_ids = consumer.pull(producer.peer, transfer_id, 40)
        await consumer.until_all(RECEIVED, transfer_id)
        consumer.check(1, range(40), block_ids)
        consumer.release(producer.peer, transfer_id)
        await producer.until_all(RELEASED, transfer_id)
        await producer.until_empty()


@both_transports
async def test_a_pull_of_something_that_never_comes_ends(transport: PullTransportName) -> None:
    loopback = Loopback(SHAPE, SHAPE, lease_s=0.6, stall_timeout_s=0.4, transport=transport)
    async with loopback as (producer, consumer):
        transfer_id = new_transfer_id()
        consumer.pull(producer.peer, transfer_id, 40)
        (event,) = await consumer.until_all(FAILED, transfer_id)
        assert "was not exported within 0.6 s" in event.reason and event.retryable
        await until(lambda: not producer.senders[0].early_pulls)
        await consumer.until_empty()


async def test_early_pulls_wait_on_when_the_process_of_their_export_was_held_up() -> None:
    """The export may be in its socket, unread."""
    async with Loopback(SHAPE, SHAPE, lease_s=0.4, stall_timeout_s=0.4) as (producer, consumer):
        transfer_id = new_transfer_id()
        block_ids = consumer.pull(producer.peer, transfer_id, 40)
        await until(lambda: bool(producer.senders[0].early_pulls))
        await all_tasks_are_held_up(0.5)
        for _ in range(50):
            await asyncio.sleep(0)
        source = producer.blocks.take(SHAPE, 40)
        producer.compute_all(1, 40, source)
        producer.export(transfer_id, 40)
        producer.send(transfer_id, -1, range(40), source, 40)
        await consumer.until_all(RECEIVED, transfer_id)
        consumer.check(1, range(40), block_ids)
        consumer.release(producer.peer, transfer_id)
        await producer.until_all(RELEASED, transfer_id)


def test_early_pulls_learn_of_each_export_of_their_transfer() -> None:
    """The first may be of another attempt than theirs."""
    pulls = EarlyPulls()
    with pulls.waiting("a") as exported, pulls.waiting("a") as other:
        for _ in range(2):
            pulls.exported("a")
            assert exported.is_set() and other.is_set()
            exported.clear()
            other.clear()
        assert len(pulls) == 1
    assert not pulls


@pytest.mark.parametrize("is_pulled_first", [True, False])
async def test_transfers_larger_than_the_staging_pool_flow_through_it(
    is_pulled_first: bool,
) -> None:
    """Nothing can be freed before it was sent; the pool stays within its bounds all the time. Two
    ranks want each chunk, so none goes straight from the blocks."""
    capacity = 24 << 10
    shape = layout(num_layers=4)
    ours = layout(num_layers=4, tp_size=2)
    loopback = Loopback(shape, ours, num_streams=2, staging_bytes=capacity)
    async with loopback as (producer, consumer):
        transfer_id = new_transfer_id()
        source = producer.blocks.take(shape, 600)
        producer.compute_all(3, 600, source)
        producer.export(transfer_id, 600)
        target = consumer.blocks.take(shape, 600)
        if is_pulled_first:
            consumer.pull(producer.peer, transfer_id, 600, block_ids=target)
        producer.send(transfer_id, -1, range(600), source, 600)
        if not is_pulled_first:
            await until(lambda: producer.staged_bytes > capacity // 3)
            await asyncio.sleep(0.05)
            assert producer.staged_bytes <= capacity - (8 << 10), "the rest is for who is pulled"
            assert producer.count(STAGED, transfer_id) == 0
            consumer.pull(producer.peer, transfer_id, 600, block_ids=target)
        while consumer.count(RECEIVED, transfer_id) < 2:
            assert producer.staged_bytes <= capacity
            await asyncio.sleep(0)
        consumer.check(3, range(600), target)
        assert stream_of(producer.senders[0]).pool.num_displaced > 0
        consumer.release(producer.peer, transfer_id)
        await producer.until_all(RELEASED, transfer_id)
        await producer.until_empty()


async def test_the_processes_of_a_rank_share_its_staging_memory() -> None:
    capacity = 64 << 10
    loopback = Loopback(
        SHAPE, SHAPE, producer_processes=4, consumer_processes=2, staging_bytes=capacity
    )
    async with loopback as (producer, consumer):
        pools = [stream_of(sender).pool for sender in producer.senders]
        assert capacity // 2 < sum(pool.capacity for pool in pools) <= capacity
        transfer_id = producer.export_computed(1, 600)
        target = consumer.pull(producer.peer, transfer_id, 600)
        await consumer.until_all(RECEIVED, transfer_id)
        consumer.check(1, range(600), target)
        consumer.release(producer.peer, transfer_id)
        await producer.until_all(RELEASED, transfer_id)
        await producer.until_empty()


async def test_stale_kv_does_not_hold_up_a_transfer_that_is_pulled() -> None:
    """Two exports that nobody pulls fill what they may; a third, pulled, uses the reserve."""
    async with Loopback(SHAPE, SHAPE, staging_bytes=24 << 10) as (producer, consumer):
        stale = [producer.export_computed(seed, 200) for seed in range(2)]
        await until(lambda: producer.staged_bytes > 10 << 10)
        transfer_id = producer.export_computed(7, 200)
        target = consumer.pull(producer.peer, transfer_id, 200)
        await consumer.until_all(RECEIVED, transfer_id)
        consumer.check(7, range(200), target)
        consumer.release(producer.peer, transfer_id)
        for old in stale:
            consumer.release(producer.peer, old, complete=False)
            await producer.until_all(ABORTED, old)
        await producer.until_all(RELEASED, transfer_id)
        await producer.until_empty()


async def test_a_block_larger_than_the_pool_fails_with_the_cure() -> None:
    async with Loopback(SHAPE, SHAPE, staging_bytes=1000) as (producer, _):
        transfer_id = producer.export_computed(1, 40)
        (event,) = await producer.until_all(FAILED, transfer_id)
        assert "staging_bytes" in event.reason and not event.retryable
        await producer.until_empty()


@pytest.mark.parametrize("first_token", [1, 15, 16, 17, 32, 99, 100])
async def test_only_missing_tokens_are_sent_and_written(first_token: int) -> None:
    for is_early in (True, False):
        async with Loopback(SHAPE, layout(block_size=64)) as (producer, consumer):
            transfer_id = new_transfer_id()
            block_ids = producer.blocks.take(SHAPE, 100)
            producer.compute_all(4, 100, block_ids)
            producer.export(transfer_id, 100)
            if is_early:
                exported = held(producer.senders[0], transfer_id)
                assert exported is not None
                target = consumer.pull(producer.peer, transfer_id, 100, first_token=first_token)
                # One that lacks nothing ends at once.
                await until(lambda transfer=exported: transfer.num_pulls_seen > 0)
            producer.send(transfer_id, -1, range(100), block_ids, 100)
            if not is_early:
                await producer.until_all(STAGED, transfer_id)
                target = consumer.pull(producer.peer, transfer_id, 100, first_token=first_token)
            await consumer.until_all(RECEIVED, transfer_id)
            consumer.check(4, range(first_token, 100), target)
            blocks = GROUP.num_blocks_for(100) - first_token // 16
            received = consumer.receivers[0].received.total()
            assert received <= (blocks + 1) * SHAPE.block_bytes
            consumer.release(producer.peer, transfer_id)
            await producer.until_all(RELEASED, transfer_id)
            await producer.until_empty()


@pytest.mark.parametrize("is_exported", [True, False])
async def test_a_puller_that_has_all_lets_go_at_once(is_exported: bool) -> None:
    """Released before anything was computed, or even exported: the blocks are free, and nothing is
    staged later."""
    async with Loopback(SHAPE, SHAPE) as (producer, consumer):
        transfer_id = new_transfer_id()
        if is_exported:
            producer.export(transfer_id, 40)
        consumer.release(producer.peer, transfer_id, complete=True)
        if not is_exported:
            await until(lambda: not consumer.receivers[0]._releases)
            producer.export(transfer_id, 40)
        await producer.until_all(RELEASED, transfer_id)
        assert producer.count(STAGED, transfer_id) == is_exported
        assert producer.senders[0].reclaimed == {Reclaim.RELEASED: 1}
        producer.send(transfer_id, -1, range(40), producer.blocks.take(SHAPE, 40), 40)
        await producer.until_empty()


# Requests that make no sense --------------------------------------------------------------------

GOOD_WISH = {
    "stream_index": 0,
    "num_streams": 2,
    "rank": 0,
    "tp_size": 1,
    "first_token": 32,
    "num_tokens": 40,
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 1},
        {"tp_size": 0},
        {"tp_size": 3},
        {"tp_size": 2**31},
        {"num_streams": 0},
        {"num_streams": 3},
        {"stream_index": 1},
        {"stream_index": 2},
        {"num_tokens": 41},
        {"first_token": 41},
        {"first_token": 2**32 - 1},
        {"repeat_chunks": [2**32 - 1]},
        {"repeat_chunks": [6, 7]},
        {"transfer_id": "x"},
        {"transfer_id": ""},
    ],
    ids=str,
)
async def test_a_pull_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    async with Loopback(SHAPE, SHAPE, producer_processes=2) as (producer, consumer):
        transfer_id = producer.export_computed(1, 40)
        named = {"transfer_id": transfer_id, "epoch": producer.peer.epoch}
        request = pb.PullRequest(**{**named, **GOOD_WISH, **wrong})
        async with grpc.aio.insecure_channel(producer.peer.endpoints[0][0]) as channel:
            pull = channel.unary_stream(
                "/tandem.v1.KVTransfer/PullKV", request_serializer=pb.PullRequest.SerializeToString
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await pull(request).read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        consumer.release(producer.peer, transfer_id)
        await producer.until_all(RELEASED, transfer_id)
        await producer.until_empty()


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"transfer_id": "x"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"transfer_id": "A" * 32}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"transfer_id": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"epoch": 2**63}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"epoch": 0}, grpc.StatusCode.FAILED_PRECONDITION),
    ],
    ids=str,
)
async def test_a_release_that_makes_no_sense_is_refused(
    wrong: dict[str, Any], code: grpc.StatusCode
) -> None:
    """It frees nothing, and no other attempt's release does."""
    async with Loopback(SHAPE, SHAPE) as (producer, consumer):
        transfer_id = producer.export_computed(1, 40)
        named = {"transfer_id": transfer_id, "epoch": producer.peer.epoch, "complete": True}
        async with grpc.aio.insecure_channel(producer.peer.endpoints[0][0]) as channel:
            release = channel.unary_unary(
                "/tandem.v1.KVTransfer/Release",
                request_serializer=pb.ReleaseRequest.SerializeToString,
                response_deserializer=pb.ReleaseReply.FromString,
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await release(pb.ReleaseRequest(**{**named, **wrong}))
            assert refused.value.code() is code
            other = await release(pb.ReleaseRequest(**named, attempt=2**32 - 1))
        assert not other.known
        assert producer.senders[0].num_transfers == 1
        consumer.release(producer.peer, transfer_id)
        await producer.until_all(RELEASED, transfer_id)
        await producer.until_empty()


async def test_foreign_block_ids_are_refused_by_both_sides() -> None:
    async with Loopback(SHAPE, SHAPE) as (producer, consumer):
        transfer_id = new_transfer_id()
        producer.export(transfer_id, 40)
        producer.send(transfer_id, -1, range(40), [1, 2, 64], 40)
        await producer.until_all(FAILED, transfer_id)
        assert "block ids" in reason(producer, transfer_id)
        consumer.pull(producer.peer, transfer_id, 40, block_ids=[-1, 0, 1])
        await consumer.until_all(FAILED, transfer_id)
        assert "block ids" in reason(consumer, transfer_id)
        await producer.until_empty()
        await consumer.until_empty()
