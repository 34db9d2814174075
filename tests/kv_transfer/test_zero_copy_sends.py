"""KV that goes straight from the blocks to the socket: what is left when things go wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kv_caches import layout
from kv_loopback import (
    Loopback,
    LoopbackConsumer,
    LoopbackProducer,
    new_transfer_id,
    stream_of,
    until,
)
from kv_proxy import Proxy

from edge.h2.out_message import OutMessage
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.metadata import TransferEventKind

FIRST_BYTE, STAGED, RELEASED, RECEIVED, FAILED, ABORTED = TransferEventKind

LARGE = layout(num_layers=8, block_size=1024)
"""A block has 32 KiB, so that chunks are received in place too."""


@pytest.fixture
def no_puller_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, nothing is staged after all, nor once the puller has gone."""
    monkeypatch.setattr("kv_transfer.transports.stream.zero_copy_sends.SLOW_S", 60.0)
    monkeypatch.setattr("kv_transfer.transports.stream.stager._WAIT_FOR_PULL_S", 60.0)


def computed_later(producer: LoopbackProducer, num_tokens: int) -> tuple[str, list[int]]:
    """Exported; its blocks become ready with the next `send`."""
    transfer_id = new_transfer_id()
    source = producer.blocks.take(producer.layout, num_tokens)
    producer.compute_all(1, num_tokens, source)
    producer.export(transfer_id, num_tokens)
    return transfer_id, source


async def pulled(consumer: LoopbackConsumer, producer: LoopbackProducer) -> None:
    await until(lambda: consumer.receivers[0].num_pulls > 0)
    await until(lambda: producer.senders[0].num_pulls == consumer.receivers[0].num_pulls)


@pytest.mark.parametrize("num_tokens", [8 * 1024, 8 * 1024 - 5])
@pytest.mark.parametrize("first_token", [0, 1024, 1500])
async def test_a_waiting_puller_gets_it_without_a_copy(
    num_tokens: int,
    first_token: int,
    no_puller_is_slow: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that holds the beginning. Whole blocks go in place; partly wanted ones are copied
    where they arrive, so that nothing else is written."""
    monkeypatch.delattr(KVCacheView, "copy_out")
    async with Loopback(LARGE, LARGE, chunk_bytes=64 << 10) as (producer, consumer):
        transfer_id, source = computed_later(producer, num_tokens)
        target = consumer.pull(producer.peer, transfer_id, num_tokens, first_token=first_token)
        await pulled(consumer, producer)
        producer.send(transfer_id, -1, range(num_tokens), source, num_tokens)
        await consumer.until_all(RECEIVED, transfer_id)
        consumer.check(1, range(first_token, num_tokens), target)
        consumer.release(producer.peer, transfer_id)
        await producer.until_all(RELEASED, transfer_id)
        assert producer.count(STAGED, transfer_id) == 1
        await producer.until_empty()


PATIENT: Any = {
    "num_streams": 2,
    "chunk_bytes": 1 << 20,
    "stall_timeout_s": 120.0,
    "lease_s": 120.0,
}
"""A puller that the test holds up fails only if the test itself hangs."""


async def stalled_amid(proxy: Proxy, producer: LoopbackProducer, consumer: LoopbackConsumer) -> str:
    """A transfer whose puller stops listening while more is on its way than sockets hold."""
    peer = await proxy.start(producer.peer)
    transfer_id, source = computed_later(producer, 64 * 1024)
    consumer.pull(peer, transfer_id, 64 * 1024)
    await pulled(consumer, producer)
    proxy.is_stalled = True
    producer.send(transfer_id, -1, range(64 * 1024), source, 64 * 1024)
    return transfer_id


async def test_a_slow_puller_does_not_keep_the_blocks() -> None:
    proxy = Proxy()
    loopback = Loopback(LARGE, LARGE, **PATIENT, staging_bytes=64 << 20)
    async with loopback as (producer, consumer):
        transfer_id = await stalled_amid(proxy, producer, consumer)
        await producer.until_all(STAGED, transfer_id)
        assert producer.staged_bytes > 0
        proxy.is_stalled = False
        await consumer.until_all(RECEIVED, transfer_id)
        consumer.release(producer.peer, transfer_id)
        await producer.until_all(RELEASED, transfer_id)
        assert producer.count(STAGED, transfer_id) == 1, "told once, whatever is sent later"
        await producer.until_empty()
        await proxy.close()


async def test_a_puller_that_is_slow_with_staged_kv_does_not_keep_the_blocks_of_the_rest() -> None:
    """No chunk is on its way from the blocks: staged ones are."""
    proxy, num_tokens = Proxy(), 64 * 1024
    proxy.stalls_behind = 1 << 16
    loopback = Loopback(LARGE, LARGE, **{**PATIENT, "num_streams": 1}, staging_bytes=64 << 20)
    async with loopback as (producer, consumer):
        peer = await proxy.start(producer.peer)
        transfer_id, source = computed_later(producer, num_tokens)
        first = range(num_tokens * 7 // 8)
        producer.send(transfer_id, -1, first, source, num_tokens)
        await until(lambda: producer.staged_bytes >= 14 << 20)
        consumer.pull(peer, transfer_id, num_tokens)
        await until(lambda: proxy.is_stalled)
        (part,) = stream_of(producer.senders[0])._parts
        await until(lambda: any(pull.is_writing for pull in part.pulls))
        assert not part.zero_copies
        producer.send(transfer_id, -1, range(first.stop, num_tokens), source, num_tokens)
        await producer.until_all(STAGED, transfer_id)
        proxy.is_stalled = False
        await consumer.until_all(RECEIVED, transfer_id)
        consumer.release(producer.peer, transfer_id)
        await producer.until_all(RELEASED, transfer_id)
        await producer.until_empty()
        await proxy.close()


@pytest.mark.parametrize("is_puller", [True, False])
async def test_an_abort_in_the_middle_of_a_chunk(is_puller: bool, no_puller_is_slow: None) -> None:
    """Without room to stage: blocks are read until the very end, and not a moment longer."""
    proxy = Proxy()
    loopback = Loopback(LARGE, LARGE, **PATIENT, staging_bytes=1 << 20)
    async with loopback as (producer, consumer):
        transfer_id = await stalled_amid(proxy, producer, consumer)
        sender = producer.senders[0]
        transfer = sender.find(transfer_id, 0)
        assert transfer is not None
        await until(lambda: bool(stream_of(sender).exports()[0].zero_copies))
        if is_puller:
            consumer.abort(transfer_id)
            await consumer.until_all(ABORTED, transfer_id)
            consumer.release(producer.peer, transfer_id, complete=False)
            await producer.until_all(ABORTED, transfer_id)
        else:
            producer.abort(transfer_id)
            await producer.until_all(ABORTED, transfer_id)
        producer.compute_all(99, 64 * 1024, *transfer.block_ids)
        proxy.is_stalled = False
        await proxy.close()
        await until(lambda: sender.num_pulls == 0)
        await producer.until_empty()
        await until(lambda: consumer.receivers[0].num_transfers == 0)


def test_a_message_says_when_nobody_reads_its_parts() -> None:
    told: list[str] = []
    blocks = bytearray(b"blocks")
    message = OutMessage([b"head", memoryview(blocks)], lambda is_sent: told.append(str(is_sent)))
    message.when_unread(lambda: told.append("at once"))
    message.begin_read()
    message.begin_read()
    reading = list(message.slices(0, message.num_wire_bytes))
    message.replace(message.joined())
    message.when_unread(lambda: told.append("later"))
    message.dropped()
    message.end_read()
    assert told == ["at once"]
    assert b"".join(reading)[5:] == b"headblocks"
    message.end_read()
    assert told == ["at once", "later", "False"]
    blocks[:] = b"others"
    assert b"others" not in b"".join(message.slices(0, message.num_wire_bytes))
    message.sent()
    assert told == ["at once", "later", "False"]


async def test_a_damaged_chunk_of_which_nothing_was_kept_is_final_and_retryable(
    no_puller_is_slow: None,
) -> None:
    proxy = Proxy(lambda n: 200 if n == 1 else None)
    async with Loopback(LARGE, LARGE, num_streams=1, chunk_bytes=64 << 10) as (producer, consumer):
        peer = await proxy.start(producer.peer)
        transfer_id, source = computed_later(producer, 8 * 1024)
        target = consumer.pull(peer, transfer_id, 8 * 1024)
        await pulled(consumer, producer)
        producer.send(transfer_id, -1, range(8 * 1024), source, 8 * 1024)
        (event,) = await consumer.until_all(FAILED, transfer_id)
        assert "cannot be repeated" in event.reason and event.retryable
        assert consumer.receivers[0].corrupt_chunks == 1
        assert consumer.caches[0].untouched_except(target)
        await asyncio.sleep(0)
        consumer.release(peer, transfer_id, complete=False)
        await producer.until_all(ABORTED, transfer_id)
        await producer.until_empty()
        await proxy.close()
